"""Reads config files into statements that know the file and the line they stand in.

The grammar is gin's own parser; finding files is ours, since gin looks for an include in the
working directory only and then says neither who included it nor what is there instead.
"""

import os
import pathlib
import re
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from gin import config_parser

from ddl.config.values import MACRO_SELECTOR, Binding, Import, Location, Macro, Reference
from ddl.errors import ConfigError
from ddl.suggestions import did_you_mean

# Where the files shipped with ddl stand, such as standard.gin.
PACKAGE_FOLDER = str(pathlib.Path(__file__).resolve().parent.parent)

Statement = Binding | Import


class _PlainValues(config_parser.ParserDelegate):
    """Has gin's parser build our own values, which need no registry."""

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> Reference:
        scope, _, selector = scoped_configurable_name.rpartition("/")
        return Reference(scope, selector, evaluate)

    def macro(self, macro_name: str) -> Macro:
        return Macro(macro_name)


class Reader:
    """Reads files, what they include, and single parameters, in the order asked for."""

    def __init__(self, search_path: Sequence[str] = ()):
        self._folders = ["", *search_path, PACKAGE_FOLDER]

    def file(self, name: str) -> Iterator[Statement]:
        """Yields the statements of a file, those it includes in their place."""
        return self._file(name, self._folders, included_at=None, including=())

    def parameter(self, text: str) -> Iterator[Statement]:
        """Yields the statements of one `--gin_param`."""
        return self._statements(text, file=None, including=())

    def text(self, text: str, name: str) -> Iterator[Statement]:
        """Yields the statements of a text that is already read; `name` says whose it is."""
        return self._statements(text, file=name, including=())

    def _file(
        self,
        name: str,
        folders: Sequence[str],
        included_at: Location | None,
        including: tuple[str, ...],
    ) -> Iterator[Statement]:
        path = _find(name, folders, included_at)
        if os.path.abspath(path) in including:
            raise _error(f"{path} includes itself, in the end.", included_at)
        try:
            text = pathlib.Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise _error(f"Cannot read the config file {path}: {error}", included_at) from error
        return self._statements(text, file=path, including=(*including, os.path.abspath(path)))

    def _statements(
        self, text: str, file: str | None, including: tuple[str, ...]
    ) -> Iterator[Statement]:
        lines = text.splitlines()

        def locate(line: int) -> Location:
            excerpt = lines[line - 1] if 0 < line <= len(lines) else ""
            return Location(file, line, excerpt if file else text.strip())

        for statement in _parse(text, locate):
            location = locate(statement.location.line_num)
            if isinstance(statement, config_parser.BindingStatement):
                yield _binding(statement, location)
            elif isinstance(statement, config_parser.ImportStatement):
                yield Import(statement.module, location)
            elif isinstance(statement, config_parser.IncludeStatement):
                here = [os.path.dirname(file)] if file else []
                folders = list(dict.fromkeys([*here, *self._folders]))
                yield from self._file(statement.filename, folders, location, including)


def parse_value(text: str) -> Any:
    """Reads one value; raises SyntaxError or TokenError when gin cannot read it."""
    return config_parser.ConfigParser(text, _PlainValues()).parse_value()


def _parse(text: str, locate: Any) -> Iterator[Any]:
    try:
        yield from config_parser.ConfigParser(text, _PlainValues())
    except SyntaxError as error:
        raise _error(_in_plain_words(error.msg), locate(error.lineno or 0)) from None
    except tokenize.TokenError as error:
        # The tokenizer only notices at the end of the text, far from where the fault is.
        line = error.args[1][0] if len(error.args) > 1 else 0
        what = "A bracket or a quotation mark is opened at or before this line and never closed."
        raise _error(what, locate(min(line, len(text.splitlines())))) from None


def _binding(statement: config_parser.BindingStatement, location: Location) -> Binding:
    scope, selector, parameter, value = statement[:4]
    if parameter:
        return Binding(scope, selector, parameter, value, location)
    name = f"{scope}/{selector}" if scope else selector
    return Binding(name, MACRO_SELECTOR, "value", value, location)


def _in_plain_words(reason: str) -> str:
    token = re.search(r"Failed to parse token '(\w+)'", reason)
    if token:
        word = token[1]
        return (
            f"{word} is not a value. Text needs quotation marks ('{word}'), a macro a percent "
            f"sign (%{word}), something to be called an at sign (@{word}())."
        )
    if "Couldn't parse statement" in reason:
        return "Expected NAME = value."
    return f"This cannot be read. {reason}"


def _find(name: str, folders: Sequence[str], included_at: Location | None) -> str:
    paths = [os.path.normpath(os.path.join(folder, name)) for folder in folders]
    for path in paths:
        if os.path.isfile(path):
            return path
    searched = list(dict.fromkeys(os.path.dirname(path) or "." for path in paths))
    hint = did_you_mean(os.path.basename(name), _config_files(searched))
    raise _error(
        f"There is no config file {name}.{hint} Looked in: {', '.join(searched)}.", included_at
    )


def _config_files(folders: Iterable[str]) -> Iterator[str]:
    for folder in folders:
        if os.path.isdir(folder):
            yield from sorted(entry for entry in os.listdir(folder) if entry.endswith(".gin"))


def _error(what: str, location: Location | None) -> ConfigError:
    return ConfigError(location.complain(what) if location else what)
