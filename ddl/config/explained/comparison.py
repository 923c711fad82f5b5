"""How two configs differ: by values, not by text."""

import dataclasses
from collections.abc import Iterator, Mapping

from ddl.config.mentions import at_the_source
from ddl.config.text import NOT_SET, changes, written
from ddl.config.values import (
    MACRO_SELECTOR,
    Binding,
    Key,
    Location,
    Macro,
    enclosing_scopes,
    leaves,
    values_of,
)


@dataclasses.dataclass(frozen=True)
class Side:
    """The value of one config.

    Attributes:
      value: The value as text, with macros replaced; `not set` without one.
      location: Its place; None if the program made the binding, or for a default.
      is_default: Whether no binding sets the parameter.
    """

    value: str
    location: Location | None
    is_default: bool


@dataclasses.dataclass(frozen=True)
class Change:
    """A parameter, or a macro of several parameters, with different values in two configs.

    Attributes:
      name: The name of the parameter or macro.
      before: The first config's value.
      after: The second config's value.
    """

    name: str
    before: Side
    after: Side


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The comparison of two configs.

    Attributes:
      changes: What differs.
      same: Number of bound parameters with the same value.
    """

    changes: tuple[Change, ...]
    same: int


def compare(before: Mapping[Key, Binding], after: Mapping[Key, Binding]) -> Comparison:
    """Compares two configs by their effective values.

    Macros are replaced by their values. A parameter that one config does not bind has its default
    there. A macro that several parameters take is one change.

    Args:
      before: The effective bindings of the first config.
      after: The effective bindings of the second config.
    """
    found: dict[tuple[str, str, str], Change] = {}
    keys = set()
    for key, name, old, new in changes(values_of(before.values()), values_of(after.values())):
        keys.add(key)
        old_text, new_text = written(old), written(new)
        change = Change(name, _side(key, old_text, before), _side(key, new_text, after))
        found.setdefault((name, old_text, new_text), change)
    bound = {key for key in {*before, *after} if key[1] != MACRO_SELECTOR}
    return Comparison((*_of_unused_macros(before, after), *found.values()), len(bound - keys))


def _of_unused_macros(
    before: Mapping[Key, Binding], after: Mapping[Key, Binding]
) -> Iterator[Change]:
    """Yields the macros that differ, and that no binding refers to: a module may read them."""
    referred = {
        scope
        for bindings in (before, after)
        for binding in bindings.values()
        for leaf in leaves(binding.value)
        if isinstance(leaf, Macro)
        for scope in enclosing_scopes(leaf.name)
    }
    for key in sorted({*before, *after}):
        if key[1] == MACRO_SELECTOR and key[0] not in referred:
            old, new = (
                repr(side[key].value) if key in side else written(NOT_SET)
                for side in (before, after)
            )
            if old != new:
                yield Change(key[0], _side(key, old, before), _side(key, new, after))


def _side(key: Key, text: str, bindings: Mapping[Key, Binding]) -> Side:
    scope, selector, parameter = key
    for enclosing in enclosing_scopes(scope):
        if binding := bindings.get((enclosing, selector, parameter)):
            (source,) = at_the_source(binding, bindings)
            return Side(text, source.location, is_default=False)
    return Side(text, None, is_default=True)
