"""Config text as statements with their places, parsed by gin without its registry.

gin's own values look up their items at once, which would import TensorFlow, and gin does not keep
the line of a binding. ddl also finds the files: an include is searched beside the including file
too, and each file is read once, so that a second include of standard.gin resets nothing.
"""

import io
import os
import tokenize
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gin.config_parser import BindingStatement as Binding
from gin.config_parser import ConfigParser, IncludeStatement, Location, ParserDelegate
from gin.config_parser import ImportStatement as Import

from ddl.errors import ConfigError, did_you_mean

# A Binding is `scope/selector.arg_name = value` with its location; a macro's scope is its name.

Key = tuple[str, str, str]
"""Scope, full name of the item, and parameter: the first three fields of a `Binding`."""

Bindings = Mapping[Key, Binding]
Texts = Collection[str]

MACRO = "gin.macro"
"""The item by which gin stores `NAME = value`, as `NAME/gin.macro.value`."""

SEED = ("SEED", MACRO, "value")
"""The macro that the program sets before it builds, if its value is None."""

PACKAGE = Path(__file__).resolve().parent.parent


class Reference(NamedTuple):
    """`@scope/selector`, `@scope/selector()`, or the macro `%scope`, which gin sees as a call."""

    scope: str
    selector: str
    evaluate: bool

    def __repr__(self) -> str:
        if self.selector == MACRO:
            return f"%{self.scope}"
        return f"@{'/'.join(filter(None, self[:2]))}{'()' * self.evaluate}"


def place(location: Location) -> str:
    """Returns `file:line`; the file of a parameter is `--gin_param`."""
    return f"{location.filename}:{location.line_num}"


def complain(location: Location | None, what: str) -> str:
    """Returns a complaint, preceded by the place of a statement and followed by its line."""
    return f"{place(location)}: {what}\n    {location.line_content.strip()}" if location else what


def raise_if_any(problems: Iterable[str]) -> None:
    """Raises ConfigError that lists the problems, without empty texts, if there are any."""
    if found := list(dict.fromkeys(filter(None, problems))):
        raise ConfigError("\n".join(found))


def nearest(key: Key, bound: Container[Key]) -> Key | None:
    """Returns the binding that a call takes: that of its scope, or of the nearest around it."""
    parts = key[0].split("/")
    keys = [("/".join(parts[:length]), *key[1:]) for length in range(len(parts), -1, -1)]
    return next((one for one in keys if one in bound), None)


def macro_key(value: Any, bound: Container[Key]) -> Key | None:
    """Returns the key of the macro that a value is; None for any other value."""
    is_macro = isinstance(value, Reference) and value.selector == MACRO
    return nearest((value.scope, MACRO, "value"), bound) if is_macro else None


def map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """Returns the value with `change` applied to each leaf of nested lists, tuples and dicts."""
    if isinstance(value, dict):
        return {map_leaves(key, change): map_leaves(item, change) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map_leaves(item, change) for item in value)
    return change(value)


def references(value: Any) -> list[Reference]:
    """Returns the references and macros within a value."""
    leaves: list[Any] = []
    map_leaves(value, leaves.append)
    return [leaf for leaf in leaves if isinstance(leaf, Reference)]


def expand(value: Any, bindings: Bindings) -> Any:
    """Replaces every macro by its value; those without a value stay."""
    if type(value) in (dict, list, tuple):
        return map_leaves(value, lambda leaf: expand(leaf, bindings))
    key = macro_key(value, bindings)
    return value if key is None else expand(bindings[key].value, bindings)


def source(binding: Binding, bindings: Bindings) -> Binding:
    """Returns the binding that holds the value: that of the macro, if the value is one."""
    key = macro_key(binding.value, bindings)
    return binding if key is None else source(bindings[key], bindings)


class _PlainValues(ParserDelegate):
    """gin's interface for the values of references and macros."""

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> Reference:
        scope, _, selector = scoped_configurable_name.rpartition("/")
        return Reference(scope, selector, evaluate)

    def macro(self, macro_name: str) -> Reference:
        return Reference(macro_name, MACRO, True)


class Reader:
    """Reader of config files with their includes, and of other texts.

    Attributes:
      files: Absolute paths of the files read so far.
    """

    def __init__(self, search_path: Collection[str] = ()):
        self.files: set[str] = set()
        # ddl's configs are inside the package in a wheel, and beside it in the repository.
        own = [str(PACKAGE / x) for x in ("", "configs", "..", "../configs")]
        self._folders = [".", *search_path, *own]

    def file(self, name: str, at: Location | None = None) -> Iterator[Binding | Import]:
        """Yields the statements of a file and its includes; none if it was read before.

        Args:
          name: Path of the file, or its name in a folder that is searched.
          at: The place of the include, whose folder is searched first.

        Raises:
          ConfigError: If a file is missing, or cannot be parsed.
        """
        folders = [os.path.dirname(at.filename) if at else ".", *self._folders]
        paths = [os.path.normpath(os.path.join(folder, name)) for folder in folders]
        path = next(filter(os.path.isfile, paths), None)
        if path is None:
            known = [found.name for folder in folders for found in Path(folder).glob("*.gin")]
            places = ", ".join(dict.fromkeys(map(os.path.normpath, folders)))
            what = f"There is no config file {name} in {places}."
            raise ConfigError(complain(at, what + did_you_mean(name, known, cutoff=0.65)))
        if os.path.abspath(path) not in self.files:
            self.files.add(os.path.abspath(path))
            yield from self.text(Path(path).read_text("utf-8-sig", errors="replace"), path)

    def text(self, text: str, file: str) -> Iterator[Binding | Import]:
        """Yields the statements of a text, such as of one `--gin_param`.

        Args:
          text: The text.
          file: Its path, or a name for errors.

        Raises:
          ConfigError: As `file` does, or if the text binds a parameter twice, or includes a file
            below a binding, which the file might override.
        """
        above: dict[Key, Location] = {}
        try:
            for statement in ConfigParser(io.StringIO(text), _PlainValues()):
                here = statement.location._replace(filename=file)
                if isinstance(statement, IncludeStatement):
                    if above:
                        what = "Move this include above all bindings, which it might override."
                        raise ConfigError(complain(here, what))
                    yield from self.file(statement.filename, here)
                elif isinstance(statement, Binding):
                    if not statement.arg_name:
                        name = "/".join(filter(None, statement[:2]))
                        statement = Binding(name, MACRO, "value", statement.value, here)
                    if (first := above.setdefault(statement[:3], here)) is not here:
                        what = f"This is set at {place(first)} already. Remove one of the two."
                        raise ConfigError(complain(here, what))
                if isinstance(statement, Binding | Import):
                    yield statement._replace(location=here)
        except (SyntaxError, tokenize.TokenError, TypeError, RecursionError) as error:
            # The tokenizer notices an open bracket only at the end of the text.
            lines = text.splitlines()
            row = min(getattr(error, "lineno", None) or len(lines), len(lines))
            # gin begins with an object of `ast`, and ends with the text that it could not parse.
            reason = str(error.args[0]).rpartition("\n")[2].strip().rstrip(".")
            what = f"Cannot parse this: {reason}. Write NAME = value with a number such as 0.05, "
            what += "'text', True, False, None, %NAME, @name() or a list, and no expression."
            raise ConfigError(complain(Location(file, row, None, lines[row - 1]), what)) from None
