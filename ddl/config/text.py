"""Config text: writing that can be read back, and comparison by effective values."""

import pprint
import tokenize
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ddl.config import registry
from ddl.config.parsing import parse_value
from ddl.config.signatures import signature_of
from ddl.config.values import (
    MACRO_SELECTOR,
    Key,
    Macro,
    Reference,
    enclosing_scopes,
    expand,
    full_selector,
    macros_of,
    map_leaves,
    shown,
)

_NOT_SET = object()
"""Stands for the value of a parameter that has neither a binding nor a default."""


def write(imports: Iterable[str], values: Mapping[Key, Any]) -> str:
    """Returns the text that binds the values: imports, macros, then one block per item."""
    blocks: dict[str, list[str]] = {}
    for module in imports:
        blocks.setdefault("imports", []).append(f"import {module}")
    for key in sorted(values, key=_order_of):
        block = "macros" if key[1] == MACRO_SELECTOR else f"{key[0]}/{key[1]}"
        blocks.setdefault(block, []).append(_binding_line(shown(key), values[key]))
    return "\n\n".join("\n".join(lines) for lines in blocks.values()) + "\n"


def _order_of(key: Key) -> tuple[bool, str, Key]:
    """Returns the sort key of a binding: macros first, then by item."""
    return key[1] != MACRO_SELECTOR, registry.short_name(key[1]).lower(), key


def _binding_line(name: str, value: Any) -> str:
    """Returns `name = value`, or a comment that says that the value cannot be written."""
    text = format_value(value, width=100 - len(name) - 3)
    if is_writable(value):
        # A continuation line must be indented deeper than the name.
        return f"{name} = " + text.replace("\n", "\n    ")
    return f"# {name} cannot be written to a config: " + " ".join(repr(value).split())


def format_value(value: Any, width: int = 100) -> str:
    """Formats a value in gin's syntax: dicts keep their order, long values span lines."""
    return pprint.pformat(value, width=max(width, 40), sort_dicts=False)


def is_writable(value: Any) -> bool:
    """Returns whether a value survives writing and reading back."""
    try:
        return repr(parse_value(format_value(value))) == repr(value)
    except (SyntaxError, tokenize.TokenError):
        return False


def differences(
    saved: Mapping[Key, Any], current: Mapping[Key, Any], ignore: Collection[str]
) -> list[str]:
    """Returns a line for each bound value that differs: `cnn.filters: (32, 64) → not set`.

    Macros are expanded before the comparison. An unbound value falls back to the binding of an
    enclosing scope, then to the parameter's default.

    Args:
      saved: The values of the earlier config, with macros not expanded.
      current: The values of this config, with macros not expanded.
      ignore: Bindings that may differ, as `shown` names them.
    """
    found: dict[str, None] = {}  # a set that keeps the order
    for key in sorted({*saved, *current}, key=_order_of):
        if key[1] == MACRO_SELECTOR or shown(key) in ignore:
            continue
        before, after = _effective(key, saved), _effective(key, current)
        if _comparable(before) != _comparable(after):
            raw, name = saved.get(key), shown(key)
            if isinstance(raw, Macro) and raw == current.get(key):
                name = raw.name
            found[f"{name}: {_written(before)} → {_written(after)}"] = None
    return list(found)


def _effective(key: Key, values: Mapping[Key, Any]) -> Any:
    scope, selector, parameter = key
    for enclosing in enclosing_scopes(scope):
        if (enclosing, selector, parameter) in values:
            return expand(values[enclosing, selector, parameter], macros_of(values))
    found = registry.matches(selector)
    defaults = signature_of(found[0].wrapped).defaults if len(found) == 1 else {}
    default = defaults.get(parameter, _NOT_SET)
    return default if default is _NOT_SET or is_writable(default) else _NOT_SET


def _comparable(value: Any) -> Any:
    def full(leaf: Any) -> Any:
        if isinstance(leaf, Reference):
            return Reference(leaf.scope, full_selector(leaf.selector), leaf.evaluate)
        # True == 1 in Python, but they differ here; 1 and 1.0 do not.
        return (bool, leaf) if isinstance(leaf, bool) else leaf

    return map_leaves(value, full)


def _written(value: Any) -> str:
    return "not set" if value is _NOT_SET else repr(value)
