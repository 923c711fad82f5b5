"""Type checks of bound values against annotations, by typeguard, before anything is built.

Three rules are stricter than Python's: True is no number, a text no sequence, and `@name` without
parentheses no value. An argument without annotation passes.
"""

import inspect
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Protocol
from unittest.mock import Mock

import typeguard

from ddl.config import registry, statements
from ddl.config.statements import SEED, Binding, Bindings, Reference


def misfit(binding: Binding, bindings: Bindings) -> str:
    """Returns the complaint about a bound value that its parameter cannot take; "" if none.

    Args:
      binding: A binding with the full name of its item.
      bindings: All effective bindings.
    """
    item = registry.matches(binding.selector)[0].wrapped
    parameter = _signature(item).parameters.get(binding.arg_name)
    if parameter is None or parameter.annotation is parameter.empty:
        return ""
    known = {k: one for k, one in bindings.items() if one.value is not None or k != SEED}
    value, annotation = statements.expand(binding.value, known), parameter.annotation
    # `x: int = None` is common: a default is valid whatever the annotation says.
    if repr(value) == repr(parameter.default) or fits(value, annotation):
        return ""
    shown = inspect.formatannotation(annotation).replace("collections.abc.", "")
    what = f"{registry.shown(binding[:3])} must be {shown.replace('typing.', '')}, got {value!r}."
    meant = value._replace(evaluate=True) if isinstance(value, Reference) else (value,)
    what += f" Write {meant!r}." if fits(meant, annotation) else ""
    return statements.complain(statements.source(binding, bindings).location, what)


def fits(value: Any, annotation: Any) -> bool:
    """Returns whether a value, with its macros expanded, fits an annotation."""
    typeguard.checker_lookup_functions.insert(0, _stricter)
    every = typeguard.CollectionCheckStrategy.ALL_ITEMS
    try:
        value = statements.map_leaves(value, _stand_in)
        typeguard.check_type(value, annotation, collection_check_strategy=every)
        return True
    except Exception as error:  # an annotation that typeguard cannot read rejects no config
        return not isinstance(error, typeguard.TypeCheckError)
    finally:
        typeguard.checker_lookup_functions.remove(_stricter)


def _signature(item: Callable[..., Any]) -> inspect.Signature:
    """Returns the signature of a function or class, with its annotations evaluated if possible."""
    try:
        return inspect.signature(item, eval_str=True)
    except Exception:  # evaluating an annotation may raise anything
        return inspect.signature(item)


def _uncalled(*args: Any, **kwargs: Any) -> None:
    """Stands for `@name` without parentheses, whose parameters gin may have bound."""


def _stand_in(leaf: Any) -> Any:
    """Returns an object of the type that a reference gives; typeguard accepts a Mock as any."""
    if not isinstance(leaf, Reference):
        return leaf
    item = registry.matches(leaf.selector)[0].wrapped
    if not leaf.evaluate:
        made = inspect.isclass(item) and type(item.__name__, (item,), {"__init__": _uncalled})
        return made or _uncalled
    # A function of the user's that is annotated with a base class may return the wanted subclass.
    is_sure = inspect.isclass(item) or item.__module__.startswith("ddl.")
    product = item if inspect.isclass(item) else _signature(item).return_annotation
    return object.__new__(product) if is_sure and inspect.isclass(product) else Mock()


def _stricter(origin: Any, args: Any, extras: Any) -> Callable[..., None] | None:
    """Returns ddl's checker for a type, if it has one, as typeguard looks it up."""
    if getattr(origin, "_is_protocol", False):
        return _check_methods
    if args and origin in (Sequence, Iterable, Collection):
        return _check_sequence
    return _check_number if origin in (int, float) else None


def _check_methods(value: Any, origin: Any, args: Any, memo: Any) -> None:
    # Not the plain attributes of a protocol, which a class may set in __init__.
    names = [x for x in {*dir(origin)} - {*dir(Protocol)} if callable(getattr(origin, x))]
    if inspect.isclass(value) or not all(hasattr(value, name) for name in names):
        raise typeguard.TypeCheckError("is no such object")


def _check_sequence(value: Any, origin: Any, args: Any, memo: Any) -> None:
    if isinstance(value, str) or not isinstance(value, origin):
        raise typeguard.TypeCheckError("is no sequence")
    for item in value:
        typeguard.check_type_internal(item, args[0], memo)


def _check_number(value: Any, origin: Any, args: Any, memo: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | origin):
        raise typeguard.TypeCheckError("is no number")
