"""The modules that configs import."""

import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ddl import user_code
from ddl.config.values import Import
from ddl.errors import ConfigError, DdlError


def check_exists(statement: Import) -> None:
    """Raises ConfigError if there is no such package. Imports nothing."""
    package = statement.module.partition(".")[0]
    try:
        with _finding_neighbours(statement.location.file):
            found = package in sys.modules or importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):  # such as of __main__, which has no spec
        return
    if not found:
        error = ModuleNotFoundError(f"No module named {package!r}")
        raise ConfigError(statement.location.complain(_reason(statement.module, error)))


@contextmanager
def _finding_neighbours(file: str | None) -> Iterator[None]:
    """Lets Python find modules in a config's folder, as the last place, in the `with` block."""
    before = list(sys.path)
    _find_neighbours(file)
    try:
        yield
    finally:
        sys.path[:] = before


def _find_neighbours(file: str | None) -> None:
    """Lets Python find modules in a config's folder from now on, as the last place."""
    folder = os.path.dirname(os.path.abspath(file)) if file else None
    if folder is not None and folder not in sys.path:
        sys.path.append(folder)


def import_module(statement: Import) -> None:
    """Imports the module of an `import` line.

    Raises:
      ConfigError: If it cannot be imported, with the line and the place in the user's code.
    """
    try:
        _find_neighbours(statement.location.file)  # its functions may import others later
        importlib.import_module(statement.module)
    except SystemExit as error:  # else the command would end with its status, such as 0
        place = user_code.place_of(error)
        if place is None:
            raise
        complaint = (
            f"Importing {statement.module} ended the process by sys.exit({error.code!r}). Call it "
            'only under `if __name__ == "__main__":`.'
        )
        raise ConfigError(f"{statement.location.complain(complaint)}\n{place.note}") from error
    except Exception as error:
        if not user_code.repeats(error):
            raise
        lines = [statement.location.complain(_reason(statement.module, error))]
        # importlib's own error for the module has no place in the user's code.
        if (place := user_code.place_of(error)) is not None:
            lines.append(place.note)
        raise ConfigError("\n".join(lines)) from error


def _reason(module: str, error: Exception) -> str:
    """Returns why a module could not be imported, with the remedy where one is known."""
    if isinstance(error, ImportError):
        return (
            f"Cannot import {module}: {error}. Install it, put it beside the config, or add its "
            "folder to PYTHONPATH."
        )
    twice = re.match(r"A different configurable matching '(.+)' already exists", str(error))
    if twice:
        name = twice[1].rpartition(".")[2]
        return (
            f"Importing {module} registers {twice[1]} a second time. Remove one of the two, or "
            f"give it another name: @gin.register('My{name}')."
        )
    what = str(error) if isinstance(error, DdlError) else f"{user_code.message_of(error)}."
    return f"Importing {module} raised {what}"
