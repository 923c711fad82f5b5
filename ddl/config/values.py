"""What a config file says, as plain values: bindings, references, macros, and where they stand.

gin forgets which line a binding came from. These values remember, and they can be read, compared
and printed without touching gin's own config.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from ddl import registry

# How gin itself stores `NAME = value`: as NAME/gin.macro.value.
MACRO_SELECTOR = "gin.macro"

# (scope, selector with its modules, parameter): what a binding is found by.
Key = tuple[str, str, str]


@dataclasses.dataclass(frozen=True)
class Location:
    """Where a statement was written; `file` is None for a `--gin_param`."""

    file: str | None
    line: int
    text: str

    def __str__(self) -> str:
        if self.file:
            return f"{self.file}:{self.line}"
        quote = '"' if "'" in self.text else "'"
        return f"--gin_param {quote}{self.text}{quote}"

    def complain(self, what: str) -> str:
        """Returns the complaint with its location in front and the line it is about below."""
        excerpt = f"\n    {self.text.strip()}" if self.file and self.text.strip() else ""
        return f"{self}: {what}{excerpt}"


@dataclasses.dataclass(frozen=True)
class Reference:
    """`@scope/selector` or, with parentheses, `@scope/selector()`."""

    scope: str
    selector: str
    evaluate: bool

    def __repr__(self) -> str:
        scope = f"{self.scope}/" if self.scope else ""
        return f"@{scope}{self.selector}{'()' if self.evaluate else ''}"


@dataclasses.dataclass(frozen=True)
class Macro:
    """`%NAME`."""

    name: str

    def __repr__(self) -> str:
        return f"%{self.name}"


@dataclasses.dataclass(frozen=True)
class Binding:
    """`scope/selector.parameter = value`, or `NAME = value` for a macro.

    Attributes:
      scope: The scope, '' for none; for a macro its name.
      selector: As written, until the checks replace it by the full one.
      parameter: The parameter bound; `value` for a macro.
      value: A literal that may hold references and macros.
      location: Where it was written; None when the program itself bound it.
    """

    scope: str
    selector: str
    parameter: str
    value: Any
    location: Location | None = None

    @property
    def key(self) -> Key:
        """What gin finds the binding by, once `selector` is the full one."""
        return self.scope, self.selector, self.parameter

    @property
    def is_macro(self) -> bool:
        """Whether this is `NAME = value`."""
        return self.selector == MACRO_SELECTOR

    def complain(self, what: str) -> str:
        """Returns the complaint with the location, where one is known."""
        return self.location.complain(what) if self.location else what


@dataclasses.dataclass(frozen=True)
class Import:
    """`import module`: for what the module registers."""

    module: str
    location: Location


def name_of(key: Key) -> str:
    """Returns the left-hand side that binds `key`."""
    scope, selector, parameter = key
    if selector == MACRO_SELECTOR and scope:
        return scope
    return f"{scope}/{selector}.{parameter}" if scope else f"{selector}.{parameter}"


def shown(key: Key) -> str:
    """Returns the left-hand side for a message: with the shortest name that is not ambiguous."""
    scope, selector, parameter = key
    if selector == MACRO_SELECTOR:
        return name_of(key)
    return name_of((scope, registry.short_name(selector), parameter))


def full_selector(selector: str) -> str:
    """Returns the full name of what a selector means; the selector itself if that is unknown."""
    found = registry.matches(selector)
    return found[0].selector if len(found) == 1 else selector


def with_full_selector(binding: Binding) -> Binding:
    """Returns the binding with the full name of what it binds, where that is known."""
    return dataclasses.replace(binding, selector=full_selector(binding.selector))


def values_of(bindings: Iterable[Binding]) -> dict[Key, Any]:
    """Returns what is bound, by key; the last binding of a key counts."""
    return {binding.key: binding.value for binding in bindings}


def macros_of(values: Mapping[Key, Any]) -> dict[str, Any]:
    """Returns the macros among values, by name."""
    return {key[0]: value for key, value in values.items() if key[1] == MACRO_SELECTOR}


def enclosing_scopes(scope: str) -> Iterator[str]:
    """Yields the scopes whose bindings a call in `scope` takes: the nearest first, '' last."""
    parts = scope.split("/") if scope else []
    for length in range(len(parts), -1, -1):
        yield "/".join(parts[:length])


def leaves(value: Any) -> Iterator[Any]:
    """Yields what a value holds that is not itself a list, a tuple or a dict."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(key)
            yield from leaves(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves(item)
    else:
        yield value


def map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """Returns the value with `change` applied to each of its leaves."""
    if isinstance(value, Mapping):
        return {map_leaves(key, change): map_leaves(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map_leaves(item, change) for item in value)
    return change(value)


class MacroCycleError(ValueError):
    """Macros that are defined by one another."""


def expand(value: Any, macros: Mapping[str, Any], seen: Collection[str] = ()) -> Any:
    """Replaces every macro by its value, and those in it; unknown ones stay.

    Raises:
      MacroCycleError: A macro is part of its own value.
    """

    def change(leaf: Any) -> Any:
        if not isinstance(leaf, Macro):
            return leaf
        if leaf.name in seen:
            raise MacroCycleError(" -> ".join(f"%{name}" for name in (*seen, leaf.name)))
        # gin lets %a/b fall back on a.
        for name in enclosing_scopes(leaf.name):
            if name in macros:
                return expand(macros[name], macros, (*seen, leaf.name))
        return leaf

    return map_leaves(value, change)
