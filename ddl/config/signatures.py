"""Signatures of registered functions and classes: parameters, annotations, defaults."""

import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

# Marks an annotation that is missing or cannot be resolved.
UNKNOWN = inspect.Parameter.empty


@dataclasses.dataclass(frozen=True)
class Signature:
    """The parameters that can be bound by name.

    Attributes:
      annotations: The type of each parameter, or `UNKNOWN`.
      defaults: The defaults, by parameter name.
      inherited: Further parameter names that a base class accepts through `**kwargs`.
      is_open: Whether the signature has `**kwargs`.
      returns: Type of the result: the class itself, or the function's return annotation.
    """

    annotations: Mapping[str, Any]
    defaults: Mapping[str, Any]
    inherited: frozenset[str]
    is_open: bool
    returns: Any


@functools.cache
def signature_of(item: Callable[..., Any]) -> Signature:
    """Returns the signature of a function or class, as far as it can be inspected."""
    if not inspect.isclass(item):
        function = inspect.unwrap(item)
        parameters = _parameters(function)
        hints = _hints(function)
        return _signature(parameters, hints, frozenset(), hints.get("return", UNKNOWN))
    constructors = [
        vars(base).get("__init__", vars(base).get("__new__"))
        for base in inspect.getmro(item)
        if base is not object and ("__init__" in vars(base) or "__new__" in vars(base))
    ]
    inherited: set[str] = set()
    for constructor in constructors[1:]:
        inherited.update(_parameters(_plain(constructor))[0])
    if not constructors:
        return Signature({}, {}, frozenset(), False, item)
    own = _plain(constructors[0])
    return _signature(_parameters(own, skip=1), _hints(own), frozenset(inherited), item)


def _plain(function: Any) -> Any:
    # __new__ is a staticmethod in the class dict; decorators hide the wrapped function.
    return inspect.unwrap(getattr(function, "__func__", function))


def _parameters(function: Any, skip: int = 0) -> tuple[dict[str, inspect.Parameter], bool]:
    try:
        # skip: the number of leading parameters to drop (self or cls).
        parameters = list(inspect.signature(function).parameters.values())[skip:]
    except (TypeError, ValueError):
        return {}, True
    bindable = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = {parameter.name: parameter for parameter in parameters if parameter.kind in bindable}
    return named, any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


def _signature(
    parameters: tuple[dict[str, inspect.Parameter], bool],
    hints: Mapping[str, Any],
    inherited: frozenset[str],
    returns: Any,
) -> Signature:
    named, is_open = parameters
    return Signature(
        annotations={name: hints.get(name, UNKNOWN) for name in named},
        defaults={
            name: parameter.default
            for name, parameter in named.items()
            if parameter.default is not inspect.Parameter.empty
        },
        inherited=inherited if is_open else frozenset(),
        is_open=is_open,
        returns=returns,
    )


def _hints(function: Any) -> dict[str, Any]:
    """Resolves annotations one by one, so that one failure does not hide the others."""
    hints = {}
    for name, annotation in getattr(function, "__annotations__", {}).items():
        try:
            hints[name] = typing.get_type_hints(
                types.SimpleNamespace(__annotations__={name: annotation}),
                globalns=getattr(function, "__globals__", {}),
            )[name]
        except Exception:
            # Resolving an annotation may raise anything.
            hints[name] = UNKNOWN
    return hints
