"""Calls of registered items, with errors that name the bindings involved."""

import os
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import gin

from ddl.config import registry
from ddl.config.values import (
    Binding,
    Key,
    Reference,
    enclosing_scopes,
    expand,
    leaves,
    macros_of,
    shown,
    values_of,
)
from ddl.errors import ConfigError, DdlError, did_you_mean
from ddl.user_code import Place, is_op_error, message_of, place_of, repeats

# No count of a library's items, and no size of a tensor that fits into memory, is as large.
_HUGE = 2**36

# Frames at the end of a traceback in which a cycle of references shows calls of gin.
_LAST = 60

# Text that gin appends to an error at each call it passes, the innermost call first.
_IN_CALL = re.compile(r"\n  In call to configurable '(.+?)' \((.+?)\)(?: in scope '(.+)')?(?:\n|$)")

# Python's message for missing arguments.
_MISSING = re.compile(
    r"(.+?)\(\) missing \d+ required (?:positional|keyword-only) arguments?: (.*)"
)


def call(name: str, args: Any, kwargs: Any, bindings: Mapping[Key, Binding]) -> Any:
    """Calls a registered item by name, in a scope if the name has one.

    Args:
      name: Name of the item, such as `RunPlan` or `train/images`.
      args: Positional arguments, ahead of the config's.
      kwargs: Keyword arguments; they override the config's.
      bindings: The bindings of the config, for errors.

    Raises:
      ConfigError: If the name is unknown or ambiguous, a value is missing, or the item or one of
        its arguments rejects a value.
    """
    selector = name.rpartition("/")[2]
    if len(registry.matches(selector)) != 1:
        raise ConfigError(
            f"{selector} must match one registered name, got {len(registry.matches(selector))} "
            f"matches.{did_you_mean(selector, registry.names())}"
        )
    return explaining(lambda: gin.get_configurable(name)(*args, **kwargs), name, bindings)


def explaining(
    build: Callable[[], Any], name: str, bindings: Mapping[Key, Binding], parameter: str = ""
) -> Any:
    """Returns the result of `build`, and adds the call and the bindings to its errors.

    Args:
      build: Function without arguments that calls the item through gin.
      name: Name of the item, for errors.
      bindings: The bindings of the config, for errors.
      parameter: The parameter of the item, where only its value is built.

    Raises:
      DdlError: An error of ddl from within the call, with a note that names the call.
      ConfigError: If a call raises TypeError, ValueError or RecursionError, an operation of
        TensorFlow refuses a value, the user's own code raises any error that repeats, or the memory
        does not hold what a huge integer asks for.
    """
    try:
        return build()
    except DdlError as error:
        cause = _original(error)
        scope, item = _innermost_call(error, name)
        where = f" in scope {scope}" if scope else ""
        note = f"\n  in call to {registry.short_name(item.selector)}{where}"
        note += f", for {name}.{parameter}" if parameter else ""
        cause.args = (f"{cause}{note}",)
        raise cause.with_traceback(error.__traceback__) from cause.__cause__
    except (TypeError, ValueError) as error:
        cause = _original(error)
        message = _explain(cause, *_innermost_call(error, name), bindings)
        raise ConfigError(message) from cause
    except RecursionError as error:
        last = [frame.filename for frame in traceback.extract_tb(error.__traceback__)[-_LAST:]]
        if any(os.path.dirname(file) == os.path.dirname(gin.__file__) for file in last):
            raise ConfigError(
                f"{name} refers to itself through its parameters. Break the cycle."
            ) from error
        raise ConfigError(
            f"{name} cannot be built: Python allows {sys.getrecursionlimit():,} nested calls, and "
            f"{last[-1]} needs more. Keras needs one for each layer of a chain: use fewer layers, "
            "or put some of them into a layer of your own."
        ) from error
    except Exception as error:
        cause = _original(error)
        scope, item = _innermost_call(error, name)
        # An operation of TensorFlow refuses values of the config, such as a size of 2^63.
        is_explained = is_op_error(cause) or place_of(cause, registry.user_packages()) is not None
        # TensorFlow and NumPy say by many types that a tensor has too many elements.
        too_large = not isinstance(cause, OSError) and any(_huge(scope, item, bindings))
        if not (repeats(cause) and is_explained) and not too_large:
            raise
        raise ConfigError(_explain(cause, scope, item, bindings)) from cause


def _original(error: BaseException) -> BaseException:
    """Returns the error without gin's wrappers, one for each call."""
    while error.__context__ and _IN_CALL.search(str(error)):
        error = error.__context__
    return error


def _innermost_call(error: BaseException, name: str) -> tuple[str, Any]:
    """Returns scope and item of the innermost call through gin, or those of `name`."""
    found = _IN_CALL.search(str(error))
    if not found:
        scope, _, selector = name.rpartition("/")
        return scope, registry.matches(selector)[0]
    items = registry.matches(found[1])
    # Several items may share the name; the second group identifies the item.
    return found[3] or "", max(items, key=lambda item: str(item.wrapped) == found[2])


def _explain(error: BaseException, scope: str, item: Any, bindings: Mapping[Key, Binding]) -> str:
    name, message = registry.short_name(item.selector), str(error).strip()
    missing = _MISSING.match(message)
    # A call deeper inside raises the same message, but no binding can fix that one.
    if missing and isinstance(error, TypeError) and missing[1] in _names(item.wrapped):
        parameters = re.findall(r"'(\w+)'", missing[2])
        if scope and (hint := _hint_of_scope(scope, item.selector, parameters, bindings)):
            return f"{name} requires a value for {', '.join(parameters)} in scope {scope}.{hint}"
        lines = [f"{name} requires a value for {', '.join(parameters)}. Add to the config:"]
        lines += [f"    {shown((scope, item.selector, one))} = …" for one in parameters]
        return "\n".join(lines)
    place = place_of(error, registry.user_packages())
    is_plain = isinstance(error, (TypeError, ValueError)) and message_of(error).endswith(message)
    lines = [f"{name} cannot be built: {message if message and is_plain else message_of(error)}"]
    lines += _given(message, scope, item, bindings, place)
    lines += [place.note] if place else _raised_in(error)
    return "\n".join(lines)


def _hint_of_scope(
    scope: str, selector: str, parameters: Collection[str], bindings: Mapping[Key, Binding]
) -> str:
    """Returns the similar scope that has the values, and the reference to the wrong one; or ""."""
    found = {
        s for s, item, parameter in bindings if s and item == selector and parameter in parameters
    }
    hint = did_you_mean(scope, found)
    if not hint:
        return ""
    wrong = (
        f"\n  {binding.location}: {shown(binding.key)} = {binding.value!r}"
        for binding in bindings.values()
        for leaf in leaves(binding.value)
        if isinstance(leaf, Reference) and leaf.scope == scope
    )
    return hint + "".join(wrong)


def _names(wrapped: Any) -> set[str]:
    """Returns the names that Python's messages may use for a function or class."""
    callables = (wrapped, wrapped.__init__, wrapped.__new__)
    return {getattr(one, "__qualname__", "") for one in callables}


def _given(
    message: str, scope: str, item: Any, bindings: Mapping[Key, Binding], place: Place | None
) -> Iterator[str]:
    """Yields a line for each binding the message names, or else for the first six of the call.

    Bindings of ddl's own items do not explain an error that the user's code raised inside.
    """
    taken = _taken(scope, item, bindings)
    named = [b for p, b in taken.items() if re.search(rf"\b{re.escape(p)}\b", message)]
    if place is not None and item.selector.startswith("ddl."):
        named, taken = [], {}
    for binding in named or _huge(scope, item, bindings) or list(taken.values())[:6]:
        yield f"  {binding.location}: {shown(binding.key)} = {binding.value!r}"


def _taken(scope: str, item: Any, bindings: Mapping[Key, Binding]) -> dict[str, Binding]:
    """Returns the bindings that a call of an item takes in a scope, by parameter."""
    taken: dict[str, Binding] = {}
    for enclosing in enclosing_scopes(scope):
        for binding in bindings.values():
            if (binding.scope, binding.selector) == (enclosing, item.selector):
                taken.setdefault(binding.parameter, binding)
    return taken


def _huge(scope: str, item: Any, bindings: Mapping[Key, Binding]) -> list[Binding]:
    """Returns the bindings that a call of an item takes which give a huge integer."""
    macros = macros_of(values_of(bindings.values()))
    return [
        binding
        for binding in _taken(scope, item, bindings).values()
        if binding.parameter != "seed"  # of any size
        and any(
            type(leaf) is int and leaf >= _HUGE for leaf in leaves(expand(binding.value, macros))
        )
    ]


def _raised_in(error: BaseException) -> Iterator[str]:
    """Yields the innermost location of an error in ddl's code."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        is_ours = os.path.dirname(frame.filename) == os.path.dirname(__file__)
        if "site-packages" not in frame.filename and not is_ours:
            yield f"  raised in {os.path.basename(frame.filename)}:{frame.lineno}"
            return
