"""Places of the bindings that an error mentions."""

import re
from collections.abc import Mapping

from ddl.config.usage import is_shipped
from ddl.config.values import MACRO_SELECTOR, Binding, Key, Macro, enclosing_scopes, shown

_MOST = 4
"""Number of places: a message that lists more names explains itself."""


def places(message: str, bindings: Mapping[Key, Binding]) -> list[str]:
    """Returns a line for each binding that a message mentions by name.

    A binding to a macro is followed to the macro's own line. Defaults shipped with ddl are left
    out. A message that has a place already gets no other.

    Args:
      message: Text of an error that mentions names such as `RunPlan.train_steps` or `TRAIN_STEPS`.
      bindings: The effective bindings.
    """
    if any(b.location and f"{b.location}:" in message for b in bindings.values()):
        return []
    lines: dict[str, None] = {}
    for binding in bindings.values():
        if _mentions(message, shown(binding.key)):
            found = _at_the_source(binding, bindings)
            if found.location and not is_shipped(found):
                lines[f"  {found.location}: {shown(found.key)} = {found.value!r}"] = None
    return list(lines)[:_MOST]


def _mentions(message: str, name: str) -> bool:
    # Not as a part of a longer name, and not as an advice to write `NAME = value`.
    return re.search(rf"(?<![\w.@%/]){re.escape(name)}(?![\w/]|\.\w)", message) is not None


def _at_the_source(binding: Binding, bindings: Mapping[Key, Binding]) -> Binding:
    """Returns the binding, or that of the macro that its value is."""
    seen: set[Key] = set()
    while isinstance(binding.value, Macro) and binding.key not in seen:
        seen.add(binding.key)
        keys = [(name, MACRO_SELECTOR, "value") for name in enclosing_scopes(binding.value.name)]
        binding = next((bindings[key] for key in keys if key in bindings), binding)
    return binding
