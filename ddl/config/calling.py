"""Errors of the code that a config imports and calls, as errors of the config."""

import importlib
import os
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

from ddl.config import registry
from ddl.config.statements import Binding, Import, Key, complain, nearest
from ddl.errors import ConfigError, DdlError
from ddl.user_code import attributing_errors, message_of, place_of

# Text that gin appends to an error at each call it passes, the innermost call first.
_IN_CALL = re.compile(r"\n  In call to configurable '(.+?)' \((.+?)\)(?: in scope '(.+)')?(?:\n|$)")


def import_module(statement: Import) -> str:
    """Imports the module of an `import` line, which may lie beside the config; returns its name.

    Raises:
      ConfigError: If it cannot be imported, with the line and the place in the user's code.
    """
    folder = os.path.dirname(os.path.abspath(statement.location.filename or ""))
    if folder not in sys.path:
        sys.path.append(folder)  # as the last place; its functions may import others later
    try:
        with attributing_errors():
            return importlib.import_module(statement.module).__name__
    except (ImportError, DdlError) as error:
        what = f"Cannot import {statement.module}: {error}. Correct it, install it, put it beside "
        what += "the config, or add its folder to PYTHONPATH."
        raise ConfigError(complain(statement.location, what)) from error


def calling(build: Callable[[], Any], name: str, bindings: Mapping[Key, Binding]) -> Any:
    """Returns the result of `build`, and adds the call and its bindings to errors.

    Args:
      build: Function without arguments that calls an item through gin.
      name: What is built, for errors.
      bindings: The bindings of the config, for errors.

    Raises:
      DdlError: An error of ddl from within the call, with a note that names the call.
      ConfigError: If a call raises TypeError, ValueError or RecursionError.
    """
    try:
        return build()
    except (DdlError, TypeError, ValueError, RecursionError) as error:
        cause: BaseException = error
        while cause.__context__ and _IN_CALL.search(str(cause)):  # gin's wrappers
            cause = cause.__context__
        call = _IN_CALL.search(str(error))
        item, scope = (call[1], call[3] or "") if call else (name, "")
        if isinstance(cause, DdlError):
            where = f" in scope {scope}" if scope else ""
            cause.args = (f"{cause}\n  in call to {item}{where}, for {name}",)
            raise cause.with_traceback(error.__traceback__) from cause.__cause__
        selectors = [one.selector for one in registry.matches(item)]
        keys = [key for key in bindings if key[1] in selectors]
        keys = [key for key in keys if nearest((scope, *key[1:]), [key])][:6]
        lines = [registry.line_of(bindings[key]) for key in keys]
        at = place_of(cause, registry.user_packages())
        lines += [at.note] if at else []
        what = f"{item} cannot be built: {message_of(cause)}"
        raise ConfigError("\n".join([what, *lines])) from cause
