"""Calls what the config describes, and says which binding an error comes from."""

import os
import re
import traceback
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any

import gin

from ddl import registry
from ddl.config.checks import shown
from ddl.config.signatures import signature_of
from ddl.config.values import Binding, Key, enclosing_scopes, name_of
from ddl.errors import ConfigError, DdlError
from ddl.suggestions import did_you_mean


def call(name: str, args: Any, kwargs: Any, bindings: Mapping[Key, Binding]) -> Any:
    """Calls a registered item by name, in a scope if the name has one.

    Raises:
        ConfigError: What is called, or what it is given, refuses a value or lacks one.
    """
    _, _, selector = name.rpartition("/")
    if len(registry.matches(selector)) != 1:
        raise ConfigError(
            f"{selector} is not registered, or not once.{did_you_mean(selector, registry.names())}"
        )
    try:
        return gin.get_configurable(name)(*args, **kwargs)
    except DdlError as error:
        raise _with_one_note(error) from error.__cause__
    except (TypeError, ValueError) as error:
        cause = _original(error)
        raise ConfigError(_explain(cause, error.__traceback__, bindings)) from cause
    except RecursionError as error:
        raise ConfigError(f"{name} is, in the end, one of its own parameters.") from error
    except RuntimeError as error:
        # How gin tells of a parameter whose default is gin.REQUIRED.
        missing = re.match(
            r"Required bindings for `.*` not provided in config: (\[.*\])", str(error)
        )
        if not missing:
            raise
        scope, selector = _innermost_call(error.__traceback__)
        names = re.findall(r"'(\w+)'", missing[1])
        raise ConfigError(_needs(scope, selector, names)) from _original(error)


def _original(error: BaseException) -> BaseException:
    """Returns the error without the wrappers that gin puts around it, one for each call."""
    while "ExceptionProxy" in type(error).__init__.__qualname__ and error.__context__:
        error = error.__context__
    return error


def _with_one_note(error: DdlError) -> BaseException:
    """Returns a DdlError as it was raised, with the call that it came from in one line."""
    original = _original(error)
    scope, selector = _innermost_call(error.__traceback__)
    if selector and len(original.args) == 1 and "\n  in call to " not in str(original.args[0]):
        where = f" in scope {scope}" if scope else ""
        note = f"\n  in call to {registry.short_name(selector)}{where}"
        original.args = (f"{original.args[0]}{note}",)
    return original.with_traceback(error.__traceback__)


def _innermost_call(frames: TracebackType | None) -> tuple[str, str]:
    """Returns scope and full name of the last call through gin before the error."""
    found = ("", "")
    for frame, _ in traceback.walk_tb(frames):
        if frame.f_code.co_name == "gin_wrapper":
            scope = frame.f_locals.get("scope_str", "")
            found = scope, frame.f_locals.get("current_selector", "")
    return found


def _explain(
    error: BaseException, frames: TracebackType | None, bindings: Mapping[Key, Binding]
) -> str:
    scope, selector = _innermost_call(frames)
    missing = _missing_arguments(error, selector)
    if missing:
        return _needs(scope, selector, missing)
    message = str(error).strip() or type(error).__name__
    lines = [f"{registry.short_name(selector)} cannot be built: {message}"]
    lines += _given(message, scope, selector, bindings.values())
    place = _raised_in(error)
    return "\n".join([*lines, f"  raised in {place}"] if place else lines)


def _missing_arguments(error: BaseException, selector: str) -> list[str]:
    """Returns the required parameters that nobody gave, when that is what the error says."""
    found = re.search(r"missing \d+ required (?:positional|keyword-only) argument", str(error))
    item = registry.matches(selector) if selector else []
    if not isinstance(error, TypeError) or not found or len(item) != 1:
        return []
    signature = signature_of(item[0].wrapped)
    names = re.findall(r"'(\w+)'", str(error)[found.end() :])
    # The same words come from a call further inside, which no binding can help.
    own = all(name in signature.annotations and name not in signature.defaults for name in names)
    called = re.match(r"(?:\w+\.)*?(\w+)(?:\.__init__|\.__new__)?\(\)", str(error))
    return names if own and called and called[1] == item[0].wrapped.__name__ else []


def _needs(scope: str, selector: str, parameters: Iterable[str]) -> str:
    name = registry.short_name(selector)
    wanted = [name_of((scope, name, parameter)) for parameter in parameters]
    return "\n".join(
        [f"{name} needs a value for {', '.join(parameters)}. Add to the config:"]
        + [f"    {one} = …" for one in wanted]
    )


def _given(message: str, scope: str, selector: str, bindings: Iterable[Binding]) -> Iterable[str]:
    """Returns a line for each binding the call took, or those the message names."""
    scopes = list(enclosing_scopes(scope))
    taken: dict[str, Binding] = {}
    for binding in bindings:
        if binding.selector == selector and binding.scope in scopes:
            nearest = taken.setdefault(binding.parameter, binding)
            if scopes.index(binding.scope) < scopes.index(nearest.scope):
                taken[binding.parameter] = binding
    named = [b for p, b in taken.items() if re.search(rf"\b{re.escape(p)}\b", message)]
    for binding in named or list(taken.values())[:6]:
        yield f"  {binding.location}: {shown(binding.key)} = {binding.value!r}"


def _raised_in(error: BaseException) -> str:
    """Returns the last line of the user's own code, or ddl's, that the error passed through."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "site-packages" not in frame.filename
        and os.path.dirname(frame.filename) != os.path.dirname(__file__)
    ]
    return f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
