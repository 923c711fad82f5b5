"""Errors of the code that a config imports and calls, as errors of the config."""

import importlib
import os
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

from ddl.config import registry
from ddl.config.statements import Binding, Import, Key, complain, nearest, place
from ddl.errors import ConfigError, DdlError
from ddl.user_code import is_op_error, message_of, place_of, repeats

# Text that gin appends to an error at each call it passes, the innermost call first.
_IN_CALL = re.compile(r"\n  In call to configurable '(.+?)' \((.+?)\)(?: in scope '(.+)')?(?:\n|$)")


def import_module(statement: Import) -> None:
    """Imports the module of an `import` line, which may lie beside the config.

    Raises:
      ConfigError: If it cannot be imported, with the line and the place in the user's code.
    """
    folder = os.path.dirname(os.path.abspath(statement.location.filename or ""))
    if folder not in sys.path:
        sys.path.append(folder)  # as the last place; its functions may import others later
    try:
        importlib.import_module(statement.module)
    except (Exception, SystemExit) as error:
        at = place_of(error)
        if not repeats(error) and not (isinstance(error, SystemExit) and at):
            raise
        reason = str(error) if isinstance(error, ImportError) else message_of(error)
        what = f"Cannot import {statement.module}: {reason}. Install it, put it beside the config, "
        what += "add its folder to PYTHONPATH, or correct it."
        note = f"\n{at.note}" if at else ""
        raise ConfigError(complain(statement.location, what) + note) from error


def calling(build: Callable[[], Any], name: str, bindings: Mapping[Key, Binding]) -> Any:
    """Returns the result of `build`, and adds the call and the bindings to its errors.

    Args:
      build: Function without arguments that calls an item through gin.
      name: What is built, for errors.
      bindings: The bindings of the config, for errors.

    Raises:
      DdlError: An error of ddl from within the call, with a note that names the call.
      ConfigError: If a call raises TypeError, ValueError or RecursionError, or an operation of
        TensorFlow refuses a value.
    """
    try:
        return build()
    except Exception as error:
        cause: BaseException = error
        while cause.__context__ and _IN_CALL.search(str(cause)):  # gin's wrappers
            cause = cause.__context__
        call = _IN_CALL.search(str(error))
        item, scope = (call[1], call[3] or "") if call else (name, "")
        if isinstance(cause, DdlError):
            where = f" in scope {scope}" if scope else ""
            cause.args = (f"{cause}\n  in call to {item}{where}, for {name}",)
            raise cause.with_traceback(error.__traceback__) from cause.__cause__
        refused = isinstance(cause, TypeError | ValueError | RecursionError) or is_op_error(cause)
        if not refused or not repeats(cause):
            raise
        selectors = [one.selector for one in registry.matches(item)]
        lines = [
            f"  {place(one.location)}: {registry.shown(key)} = {one.value!r}"
            for key, one in bindings.items()
            if key[1] in selectors and nearest((scope, *key[1:]), [key]) and one.location
        ]
        at = place_of(cause, registry.user_packages())
        lines = [
            f"{item} cannot be built: {message_of(cause)}",
            *lines[:6],
            *([at.note] if at else []),
        ]
        raise ConfigError("\n".join(lines)) from cause
