"""Type checks of bound values against annotations, by typeguard, before anything is built.

Three rules are stricter than Python's: True is no number, a text no sequence, and `@name` without
parentheses no value. What has no annotation passes.
"""

import inspect
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any
from unittest.mock import Mock

import typeguard

from ddl.config import registry
from ddl.config.statements import (
    SET_LATER,
    Binding,
    Key,
    Reference,
    complain,
    expand,
    map_leaves,
    source,
)


def misfit(binding: Binding, bindings: Mapping[Key, Binding]) -> str:
    """Returns the complaint about a bound value that its parameter cannot take; "" if none.

    Args:
      binding: A binding with the full name of its item.
      bindings: All effective bindings.
    """
    item = registry.matches(binding.selector)[0].wrapped
    annotation = _hints(item).get(binding.arg_name, Any)
    is_set = {k: b for k, b in bindings.items() if b.value is not None or k[0] not in SET_LATER}
    value = expand(binding.value, is_set)
    parameter = registry.parameters_of(item).get(binding.arg_name)
    # `x: int = None` is common: a default is valid whatever the annotation says.
    if (parameter and repr(value) == repr(parameter.default)) or fits(value, annotation):
        return ""
    shown = inspect.formatannotation(annotation).replace("collections.abc.", "")
    what = f"{registry.shown(binding[:3])} must be {shown.replace('typing.', '')}, got {value!r}."
    if isinstance(value, Reference) and not value.evaluate:
        what += f" Write {value!r}()."
    return complain(source(binding, bindings).location, what)


def fits(value: Any, annotation: Any) -> bool:
    """Returns whether a value, with its macros expanded, fits an annotation."""
    typeguard.checker_lookup_functions.insert(0, _stricter)
    try:
        typeguard.check_type(
            map_leaves(value, _stand_in),
            annotation,
            forward_ref_policy=typeguard.ForwardRefPolicy.IGNORE,
            collection_check_strategy=typeguard.CollectionCheckStrategy.ALL_ITEMS,
        )
    except typeguard.TypeCheckError:
        return False
    except Exception:  # an annotation that typeguard cannot read must not reject a config
        return True
    finally:
        typeguard.checker_lookup_functions.remove(_stricter)
    return True


def _hints(item: Callable[..., Any]) -> Mapping[str, Any]:
    """Returns the annotations of a function or of a class's constructor, as far as they resolve."""
    try:
        return typing.get_type_hints(item.__init__ if inspect.isclass(item) else item)
    except Exception:  # resolving an annotation may raise anything
        return {}


class _Uncalled:
    """Stands for `@name` without parentheses, which is callable and nothing else."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError


def _stand_in(leaf: Any) -> Any:
    """Returns an object of the type that a reference gives; typeguard accepts a Mock as any."""
    if not isinstance(leaf, Reference):
        return leaf
    if not leaf.evaluate:
        return _Uncalled()
    item = registry.matches(leaf.selector)[0].wrapped
    # A function of the user's that is annotated with a base class may return the wanted subclass.
    is_sure = inspect.isclass(item) or item.__module__.startswith("ddl.")
    product = item if inspect.isclass(item) else _hints(item).get("return")
    return object.__new__(product) if is_sure and inspect.isclass(product) else Mock()


def _stricter(origin: Any, args: Any, extras: Any) -> Callable[..., None] | None:
    """Returns ddl's checker for numbers, protocols and sequences, as typeguard looks one up."""
    if origin in (int, float):
        return _check_number
    if getattr(origin, "_is_protocol", False):
        return _check_methods
    return _check_sequence if args and origin in (Sequence, Iterable, Collection) else None


def _check_methods(value: Any, origin: Any, args: Any, memo: Any) -> None:
    # Not its plain attributes, which a class may set in __init__.
    names = set(dir(origin)) - set(dir(typing.Protocol))
    if not all(hasattr(value, one) for one in names if callable(getattr(origin, one))):
        raise typeguard.TypeCheckError("lacks a method")


def _check_number(value: Any, origin: Any, args: Any, memo: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | origin):
        raise typeguard.TypeCheckError("is not a number")


def _check_sequence(value: Any, origin: Any, args: Any, memo: Any) -> None:
    if isinstance(value, str) or not isinstance(value, origin):
        raise typeguard.TypeCheckError("is not a sequence")
    for item in value:
        typeguard.check_type_internal(item, args[0], memo)
