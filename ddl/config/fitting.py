"""Type checks of bound values against annotations; undecidable cases pass.

typeguard checks literals. Two rules are stricter, since both mistakes silently change a training:
True is not a number, and a string is not a sequence of strings.
"""

import collections.abc
import inspect
import types
import typing
from collections.abc import Callable
from typing import Any

import typeguard

from ddl.config import registry
from ddl.config.signatures import UNKNOWN, signature_of
from ddl.config.values import Macro, Reference, leaves

_UNIONS = (typing.Union, types.UnionType)


def fits(value: Any, annotation: Any) -> bool:
    """Returns whether a value, with its macros expanded, fits an annotation."""
    annotation = _plain(annotation)
    if annotation is UNKNOWN or isinstance(value, Macro):
        return True
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in _UNIONS:
        return any(fits(value, member) for member in arguments)
    if isinstance(value, Reference):
        return _reference_fits(value, annotation)
    if isinstance(value, bool) and annotation in (int, float, complex):
        return False
    if inspect.isclass(origin) and arguments:
        if isinstance(value, str) and issubclass(origin, collections.abc.Iterable):
            return False
        if isinstance(value, (list, tuple, dict)):
            return _container_fits(value, annotation, origin, arguments)
    if any(isinstance(leaf, Reference) for leaf in leaves(value)):
        return not inspect.isclass(annotation) or (
            not _is_protocol(annotation) and isinstance(value, annotation)
        )
    try:
        typeguard.check_type(
            value,
            annotation,
            forward_ref_policy=typeguard.ForwardRefPolicy.IGNORE,
            collection_check_strategy=typeguard.CollectionCheckStrategy.ALL_ITEMS,
        )
    except typeguard.TypeCheckError:
        return False
    except Exception:
        # An annotation that typeguard cannot handle must not reject a config.
        return True
    return True


def describe(annotation: Any) -> str:
    """Formats an annotation as in source code."""
    text = inspect.formatannotation(annotation).replace("NoneType", "None")
    return text.replace("collections.abc.", "").replace("typing.", "")


def _plain(annotation: Any) -> Any:
    """Strips Annotated and NewType; maps uninformative annotations to UNKNOWN."""
    while True:
        if typing.get_origin(annotation) is typing.Annotated:
            annotation = typing.get_args(annotation)[0]
        elif isinstance(annotation, typing.NewType):
            annotation = annotation.__supertype__
        else:
            break
    silent = annotation in (Any, object) or isinstance(
        annotation, (str, typing.TypeVar, typing.ForwardRef)
    )
    return UNKNOWN if silent else annotation


def _container_fits(value: Any, annotation: Any, origin: type, arguments: Any) -> bool:
    if not issubclass(type(value), origin):
        return False
    if isinstance(value, dict):
        if len(arguments) != 2:
            return True
        return all(fits(k, arguments[0]) and fits(v, arguments[1]) for k, v in value.items())
    if origin is tuple:
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return all(fits(item, arguments[0]) for item in value)
        if arguments == ((),):
            return not value
        return len(value) == len(arguments) and all(map(fits, value, arguments))
    return all(fits(item, arguments[0]) for item in value)


def _reference_fits(reference: Reference, annotation: Any) -> bool:
    found = registry.matches(reference.selector)
    if len(found) != 1:  # reported elsewhere
        return True
    item = found[0].wrapped
    if reference.evaluate:
        return _product_fits(signature_of(item).returns, annotation, item)
    return _callable_fits(item, annotation)


def _product_fits(product: Any, annotation: Any, item: Callable[..., Any]) -> bool:
    """Returns whether the result of calling `item`, of type `product`, fits."""
    product = _plain(product)
    if product is UNKNOWN:
        return True
    if typing.get_origin(product) in _UNIONS:
        return any(_product_fits(one, annotation, item) for one in typing.get_args(product))
    product = type(None) if product is None else typing.get_origin(product) or product
    wanted = typing.get_origin(annotation) or annotation
    if not inspect.isclass(product) or not inspect.isclass(wanted):
        return True
    if _is_protocol(wanted):
        return _has_methods(product, wanted)
    if wanted is float and product is int:
        return True
    try:
        # A function annotated with a base class may return the wanted subclass.
        return issubclass(product, wanted) or (
            not inspect.isclass(item) and issubclass(wanted, product)
        )
    except TypeError:
        return True


def _callable_fits(item: Callable[..., Any], annotation: Any) -> bool:
    """Returns whether a function or class fits when it is passed without being called."""
    origin = typing.get_origin(annotation) or annotation
    if origin is collections.abc.Callable:
        return True
    if origin is type:
        wanted = [one for one in typing.get_args(annotation) if inspect.isclass(one)]
        return inspect.isclass(item) and (not wanted or issubclass(item, tuple(wanted)))
    if not inspect.isclass(origin):
        return origin is not typing.Literal
    if _is_protocol(origin):
        return _methods(origin) == {"__call__"}
    return isinstance(item, origin)


def _is_protocol(annotation: Any) -> bool:
    return getattr(annotation, "_is_protocol", False)


def _methods(protocol: type) -> set[str]:
    # Methods only: plain attributes may be set in __init__, which the class does not show.
    return {
        name
        for base in protocol.__mro__
        if _is_protocol(base) and base is not typing.Protocol
        for name, member in vars(base).items()
        if inspect.isfunction(member) and name not in ("__init__", "__subclasshook__")
    }


def _has_methods(product: type, protocol: type) -> bool:
    return all(any(name in vars(base) for base in product.__mro__) for name in _methods(protocol))
