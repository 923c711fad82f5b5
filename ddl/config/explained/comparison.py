"""Comparison of two configs by values, not by text."""

import dataclasses
from collections.abc import Collection, Iterator, Mapping

from ddl.config import registry
from ddl.config.explained.provenance import items_in_use
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
      value: The value as text, with macros replaced; `not set` without one. If nothing binds the
        item or refers to it, a text that says so.
      location: Its place; None if the program made the binding, or for a default.
      is_default: Whether the value is the parameter's default.
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
      changes: The differences.
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
    uses = tuple(_used(bindings) for bindings in (before, after))
    found: dict[tuple[str, str, str], Change] = {}
    keys = set()
    for key, name, old, new in changes(values_of(before.values()), values_of(after.values())):
        keys.add(key)
        old_text, new_text = written(old), written(new)
        change = Change(
            name, _side(key, old_text, before, uses[0]), _side(key, new_text, after, uses[1])
        )
        found.setdefault((name, old_text, new_text), change)
    bound = {key for key in {*before, *after} if key[1] != MACRO_SELECTOR}
    changed = [*_of_unused_macros(before, after), *found.values()]
    changed.sort(key=lambda change: "." in change.name)  # macros first
    return Comparison(tuple(changed), len(bound - keys))


def _used(bindings: Mapping[Key, Binding]) -> set[str]:
    return {*items_in_use(bindings.values()), *(key[1] for key in bindings)}


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
                yield Change(
                    key[0],
                    _side(key, old, before, {MACRO_SELECTOR}),
                    _side(key, new, after, {MACRO_SELECTOR}),
                )


def _side(key: Key, text: str, bindings: Mapping[Key, Binding], used: Collection[str]) -> Side:
    scope, selector, parameter = key
    for enclosing in enclosing_scopes(scope):
        if binding := bindings.get((enclosing, selector, parameter)):
            (source,) = at_the_source(binding, bindings)
            return Side(text, source.location, is_default=False)
    if selector not in used:
        return Side(f"(nothing refers to {registry.short_name(selector)})", None, is_default=False)
    return Side(text, None, is_default=text != written(NOT_SET))
