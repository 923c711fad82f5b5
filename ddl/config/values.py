"""Config statements as plain values: bindings, references, macros, and their locations.

gin does not record the line of a binding. These values do, and they can be read, compared and
printed independently of gin's own config.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ddl.config import registry

# gin stores `NAME = value` as NAME/gin.macro.value.
MACRO_SELECTOR = "gin.macro"

# Key of a binding: (scope, selector with its modules, parameter).
Key = tuple[str, str, str]


@dataclasses.dataclass(frozen=True)
class Location:
    """Location of a statement.

    Attributes:
      file: Path of the file; None for a `--gin_param`.
      line: Line number, counted from 1.
      text: The line, or the whole `--gin_param`.
      reading: Absolute paths of the open files, each including file before its include.
    """

    file: str | None
    line: int
    text: str
    reading: tuple[str, ...] = dataclasses.field(default=(), compare=False)

    def __str__(self) -> str:
        if self.file:
            return f"{self.file}:{self.line}"
        quote = '"' if "'" in self.text else "'"
        return f"--gin_param {quote}{self.text}{quote}"

    def complain(self, what: str) -> str:
        """Returns the complaint, preceded by the location and followed by the line."""
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
      scope: The scope, '' for none; for a macro, its name.
      selector: Name of the item as written; the checks replace it by the full name.
      parameter: The parameter bound; `value` for a macro.
      value: A literal that may contain references and macros.
      location: Location of the statement; None if the program made the binding.
    """

    scope: str
    selector: str
    parameter: str
    value: Any
    location: Location | None = None

    @property
    def key(self) -> Key:
        """Key of the binding in gin, once `selector` is the full name."""
        return self.scope, self.selector, self.parameter

    @property
    def is_macro(self) -> bool:
        """Whether the binding is a macro, `NAME = value`."""
        return self.selector == MACRO_SELECTOR

    def complain(self, what: str) -> str:
        """Returns the complaint with the location, if known."""
        return self.location.complain(what) if self.location else what


@dataclasses.dataclass(frozen=True)
class Import:
    """`import module`: a module that registers items."""

    module: str
    location: Location


def name_of(key: Key) -> str:
    """Returns the left-hand side of a binding of `key`, with the full selector."""
    scope, selector, parameter = key
    if selector == MACRO_SELECTOR and scope:
        return scope
    return f"{scope}/{selector}.{parameter}" if scope else f"{selector}.{parameter}"


def shown(key: Key) -> str:
    """Returns the left-hand side of a binding of `key`, with the shortest unambiguous name."""
    scope, selector, parameter = key
    if selector == MACRO_SELECTOR:
        return name_of(key)
    return name_of((scope, registry.short_name(selector), parameter))


def full_selector(selector: str) -> str:
    """Returns the full name for a selector; the selector itself if unknown or ambiguous."""
    found = registry.matches(selector)
    return found[0].selector if len(found) == 1 else selector


def with_full_selector(binding: Binding) -> Binding:
    """Returns the binding with its selector replaced by the full name, if known."""
    return dataclasses.replace(binding, selector=full_selector(binding.selector))


def values_of(bindings: Iterable[Binding]) -> dict[Key, Any]:
    """Returns the bound values by key; the last binding of a key counts."""
    return {binding.key: binding.value for binding in bindings}


def macros_of(values: Mapping[Key, Any]) -> dict[str, Any]:
    """Returns the values of the macros, by name."""
    return {key[0]: value for key, value in values.items() if key[1] == MACRO_SELECTOR}


def enclosing_scopes(scope: str) -> Iterator[str]:
    """Yields the scopes whose bindings apply in `scope`: the nearest first, '' last."""
    parts = scope.split("/") if scope else []
    for length in range(len(parts), -1, -1):
        yield "/".join(parts[:length])


def leaves(value: Any) -> Iterator[Any]:
    """Yields the leaves of nested lists, tuples and dicts, including dict keys."""
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
    """Returns the value with `change` applied to each leaf."""
    if isinstance(value, Mapping):
        return {map_leaves(key, change): map_leaves(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map_leaves(item, change) for item in value)
    return change(value)


class MacroCycleError(ValueError):
    """A cycle of macros that refer to each other, or a chain that is as good as endless."""


_MOST_MACROS = 50  # in a chain; far fewer than Python's limit of nested calls


def expand(value: Any, macros: Mapping[str, Any], seen: Sequence[str] = ()) -> Any:
    """Replaces every macro by its value, recursively; unknown macros stay.

    Args:
      value: The value to expand.
      macros: Values of the macros, by name.
      seen: Names of the macros being expanded.

    Raises:
      MacroCycleError: If a macro is part of its own value, or the end of a long chain.
    """

    def change(leaf: Any) -> Any:
        if not isinstance(leaf, Macro):
            return leaf
        if leaf.name in seen:
            cycle = " -> ".join(f"%{name}" for name in (*seen, leaf.name))
            raise MacroCycleError(
                f"Macros refer to each other in a cycle: {cycle}. Give one of them a value."
            )
        if len(seen) == _MOST_MACROS:
            raise MacroCycleError(
                f"%{seen[0]} must lead to its value by at most {_MOST_MACROS} macros, got more. "
                "Refer to a macro that has a value."
            )
        # In gin, %a/b falls back to a.
        for name in enclosing_scopes(leaf.name):
            if name in macros:
                return expand(macros[name], macros, (*seen, leaf.name))
        return leaf

    return map_leaves(value, change)
