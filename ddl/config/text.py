"""Config text that can be read back, and the comparison of two texts."""

import pprint
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ddl.config import registry
from ddl.config.statements import MACRO, Binding, Key, Reader, expand


def write(modules: Iterable[str], values: Mapping[Key, Any]) -> str:
    """Returns the text that binds the values: imports, macros, then the items in order."""
    lines = [f"import {module}" for module in modules]
    for key in sorted(values, key=lambda key: (key[1] != MACRO, registry.short_name(key[1]), key)):
        name = registry.shown(key)
        # Dicts keep their order. A continuation line must be indented deeper than the name.
        value = pprint.pformat(values[key], width=max(97 - len(name), 40), sort_dicts=False)
        lines.append(f"{name} = " + value.replace("\n", "\n    "))
    return "\n".join(lines) + "\n"


def differences(saved_text: str, current_text: str, ignore: Collection[str]) -> list[str]:
    """Compares two operative configs, with macros expanded.

    Args:
      saved_text: The `operative_config_text` of an earlier run.
      current_text: That of this run.
      ignore: Bindings that may differ, by their shortest names, such as `RunPlan.train_steps`.

    Returns:
      Lines such as `cnn.filters: (32, 64) → (32,)`.

    Raises:
      ConfigError: If the saved text cannot be parsed.
    """
    saved, current = _values(saved_text), _values(current_text)
    return [
        f"{name}: {saved.get(name, 'not set')} → {current.get(name, 'not set')}"
        for name in {**saved, **current}
        if saved.get(name) != current.get(name) and name not in ignore
    ]


def _values(text: str) -> dict[str, str]:
    """Returns the texts of the bound values, with macros expanded, by name."""
    statements = Reader().text(text, "the saved config")
    bindings = {one[:3]: one for one in statements if isinstance(one, Binding)}
    items = [one for one in bindings.values() if one.selector != MACRO]
    return {registry.shown(one[:3]): repr(expand(one.value, bindings)) for one in items}
