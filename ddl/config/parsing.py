"""Parser of config files into statements with their file and line.

gin's own parser reads the grammar. ddl searches the files, since gin looks for an include only in
the working directory, and its error names neither the including file nor similar files.
"""

import os
import pathlib
import re
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from gin import config_parser

from ddl.config.remedies import for_missing_file, for_statement
from ddl.config.values import MACRO_SELECTOR, Binding, Import, Location, Macro, Reference
from ddl.errors import ConfigError, did_you_mean

# Folder of the files shipped with ddl, such as standard.gin.
PACKAGE_FOLDER = str(pathlib.Path(__file__).resolve().parent.parent)

# The configs are inside the package in a wheel, and beside it in the repository.
CONFIGS = [
    str(folder)
    for folder in (
        pathlib.Path(PACKAGE_FOLDER, "configs"),
        pathlib.Path(PACKAGE_FOLDER).parent / "configs",
    )
    if (folder / "digits_cnn.gin").exists()
]

STANDARD = "standard.gin"

Statement = Binding | Import


class _PlainValues(config_parser.ParserDelegate):
    """gin parser delegate that builds ddl's values, which need no registry."""

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> Reference:
        scope, _, selector = scoped_configurable_name.rpartition("/")
        return Reference(scope, selector, evaluate)

    def macro(self, macro_name: str) -> Macro:
        return Macro(macro_name)


class Reader:
    """Reader of config files, their includes and single parameters."""

    def __init__(self, search_path: Sequence[str] = ()):
        self._folders = ["", *search_path, PACKAGE_FOLDER, *CONFIGS]

    def file(self, name: str) -> Iterator[Statement]:
        """Yields the statements of a file, with includes expanded in place.

        Raises:
          ConfigError: If a file is missing, cannot be read or parsed, or includes itself.
        """
        return self._file(name, self._folders, included_at=None, including=())

    def parameter(self, text: str) -> Iterator[Statement]:
        """Yields the statements of one `--gin_param`.

        Raises:
          ConfigError: If the text cannot be parsed.
        """
        return self._statements(text, file=None, including=())

    def text(self, text: str, name: str) -> Iterator[Statement]:
        """Yields the statements of the saved config of a run, which has no includes.

        Args:
          text: The config text.
          name: Name of its source, for errors.

        Raises:
          ConfigError: If the text cannot be parsed, or includes a file: none is opened.
        """
        return self._statements(text, file=name, including=(), opens_files=False)

    def _file(
        self,
        name: str,
        folders: Sequence[str],
        included_at: Location | None,
        including: tuple[str, ...],
    ) -> Iterator[Statement]:
        path = _find(name, folders, included_at)
        if os.path.abspath(path) in including:
            raise _error(
                f"{path} includes itself, directly or through other files. Remove an include.",
                included_at,
            )
        try:
            text = pathlib.Path(path).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise _error(f"Cannot read the config file {path}: {error}.", included_at) from error
        return self._statements(text, file=path, including=(*including, os.path.abspath(path)))

    def _statements(
        self,
        text: str,
        file: str | None,
        including: tuple[str, ...],
        opens_files: bool = True,
    ) -> Iterator[Statement]:
        lines = text.splitlines()

        def locate(line: int) -> Location:
            excerpt = lines[line - 1] if 0 < line <= len(lines) else ""
            return Location(file, line, excerpt if file else text.strip(), including)

        for statement in _parse(text, locate):
            location = locate(statement.location.line_num)
            if isinstance(statement, config_parser.BindingStatement):
                yield _binding(statement, location)
            elif isinstance(statement, config_parser.ImportStatement):
                yield Import(statement.module, location)
            elif isinstance(statement, config_parser.IncludeStatement):
                if not opens_files:
                    raise _error(
                        "The saved config of a run must have no include. Replace it by the "
                        "statements of the file.",
                        location,
                    )
                here = [os.path.dirname(file)] if file else []
                folders = list(dict.fromkeys([*here, *self._folders]))
                yield from self._file(statement.filename, folders, location, including)


def hint_of_standard(name: str, bindings: Iterable[Binding]) -> str:
    """Returns advice to include `standard.gin`, if it defines a macro and was not read; or ""."""
    standard = os.path.join(PACKAGE_FOLDER, STANDARD)
    read = {binding.location.file for binding in bindings if binding.location}
    if any(file and os.path.abspath(file) == standard for file in read):
        return ""
    defined = re.search(rf"^{re.escape(name)} =", pathlib.Path(standard).read_text(), re.MULTILINE)
    return f" Add include '{STANDARD}', which defines it, as the first line." if defined else ""


def parse_value(text: str) -> Any:
    """Parses one value; raises SyntaxError or TokenError if gin cannot parse it."""
    return config_parser.ConfigParser(text, _PlainValues()).parse_value()


def _parse(text: str, locate: Any) -> Iterator[Any]:
    parser = config_parser.ConfigParser(text, _PlainValues())
    try:
        yield from parser
    except SyntaxError as error:
        location = locate(error.lineno or 0)
        raise _error(for_statement(error.msg, location.text), location) from None
    except (RecursionError, TypeError) as error:  # such as a list as a key of a dict
        line = parser.current_token.start[0]
        raise _error(f"Cannot parse this statement: {error}.", locate(line)) from None
    except tokenize.TokenError as error:
        # The tokenizer notices only at the end of the text, far from the fault.
        line = error.args[1][0] if len(error.args) > 1 else 0
        what = (
            "A bracket or quotation mark opened on or before this line is never closed. Close it."
        )
        raise _error(what, locate(min(line, len(text.splitlines())))) from None


def _binding(statement: config_parser.BindingStatement, location: Location) -> Binding:
    scope, selector, parameter, value = statement[:4]
    if parameter:
        return Binding(scope, selector, parameter, value, location)
    name = f"{scope}/{selector}" if scope else selector
    return Binding(name, MACRO_SELECTOR, "value", value, location)


def _find(name: str, folders: Sequence[str], included_at: Location | None) -> str:
    paths = [os.path.normpath(os.path.join(folder, name)) for folder in folders]
    for path in paths:
        if os.path.isfile(path):
            return path
    searched = list(dict.fromkeys(os.path.dirname(path) or "." for path in paths))
    hint = for_missing_file(name, paths, is_flag=included_at is None)
    hint = hint or did_you_mean(os.path.basename(name), _config_files(searched))
    raise _error(
        f"There is no config file {name}.{hint} Searched in: {', '.join(searched)}.", included_at
    )


def _config_files(folders: Iterable[str]) -> Iterator[str]:
    for folder in folders:
        if os.path.isdir(folder):
            yield from sorted(entry for entry in os.listdir(folder) if entry.endswith(".gin"))


def _error(what: str, location: Location | None) -> ConfigError:
    return ConfigError(location.complain(what) if location else what)
