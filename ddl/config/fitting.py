"""Type checks of bound values against annotations; undecidable cases pass.

typeguard checks literals. Two rules are stricter, since both mistakes silently change a training:
True is not a number, and a string is not a sequence of strings.
"""

import collections.abc
import inspect
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

import typeguard

from ddl.config import registry
from ddl.config.signatures import UNKNOWN, signature_of
from ddl.config.values import Macro, Reference, leaves
from ddl.errors import either

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


# What a value must be, and the plural for lists of such values.
_WORDS: dict[Any, tuple[str, str]] = {
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    str: ("a text", "texts"),
    bool: ("True or False", ""),
    type(None): ("None", ""),
    dict: ("a dict", "dicts"),
    list: ("a list", "lists"),
    tuple: ("a tuple", "tuples"),
    type: ("a class", "classes"),
}


def in_words(annotation: Any) -> str:
    """Describes the values that fit an annotation, for messages."""
    annotation = _plain(annotation)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in _UNIONS or origin is typing.Literal:
        return either(dict.fromkeys(_alternatives(annotation)))
    if annotation in _WORDS:
        return _WORDS[annotation][0]
    if annotation is UNKNOWN:
        return "another value"
    origin = origin or annotation
    if origin is collections.abc.Callable:
        return "a function"
    if inspect.isclass(origin) and issubclass(origin, collections.abc.Mapping):
        return f"a dict ({': '.join(map(in_words, arguments))})" if arguments else "a dict"
    if origin is tuple and arguments and arguments[-1] is not Ellipsis:
        return f"a tuple ({', '.join(map(in_words, arguments))})"
    if inspect.isclass(origin) and issubclass(origin, collections.abc.Iterable) and arguments:
        kind = "a tuple" if origin is tuple else "a list"
        items = _WORDS.get(_plain(arguments[0]), ("", ""))[1]
        return f"{kind} of {items}" if items else f"{kind} that holds {in_words(arguments[0])}"
    if inspect.isclass(origin):
        methods = sorted(_methods(origin)) if _is_protocol(origin) else []
        having = f" (an object with the method {' and '.join(methods)})" if methods else ""
        article = "an" if origin.__name__[0] in "AEIOU" else "a"
        return f"{article} {origin.__name__}{having}"
    return describe(annotation)


def _alternatives(annotation: Any) -> Iterator[str]:
    for member in typing.get_args(annotation):
        if typing.get_origin(annotation) is typing.Literal:
            yield repr(member)
        elif typing.get_origin(_plain(member)) in (*_UNIONS, typing.Literal):
            yield from _alternatives(_plain(member))
        else:
            yield in_words(member)


def how_to_fit(reference: Reference, annotation: Any) -> str:
    """Returns how a reference that does not fit a class could; "" if no way is known.

    Either an item of ddl makes an object that fits from this one, as a task is made from a model,
    or the class lacks a method.
    """
    found = registry.matches(reference.selector)
    if not reference.evaluate or len(found) != 1:
        return ""
    product = _plain(signature_of(found[0].wrapped).returns)
    if not inspect.isclass(product):
        return ""
    for item in registry.items():
        signature = signature_of(item.wrapped)
        if item.selector.startswith("ddl.") and _fits_surely(signature.returns, annotation):
            for parameter, taken in signature.annotations.items():
                if _fits_surely(product, taken):
                    name = registry.short_name(item.selector)
                    return f" Write {name}.{parameter} = {reference!r}, and @{name}() here."
    protocols = filter(_is_protocol, _members(annotation))
    lacking = [" and ".join(sorted(_methods(one))) for one in protocols]
    return f" Give {product.__name__} the method {either(lacking)}." if lacking else ""


def _members(annotation: Any) -> list[Any]:
    """Returns the members of a union; the annotation itself if it is none."""
    is_union = typing.get_origin(annotation) in _UNIONS
    return list(map(_plain, typing.get_args(annotation) if is_union else (annotation,)))


def _fits_surely(product: Any, annotation: Any) -> bool:
    """Returns whether a class is a subclass of an annotation's class, or has its methods."""
    if not inspect.isclass(product) or product is UNKNOWN:
        return False
    return any(
        _has_methods(product, one) if _is_protocol(one) else issubclass(product, one)
        for one in _members(annotation)
        if inspect.isclass(one) and one not in (UNKNOWN, object, type(None))
    )


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
