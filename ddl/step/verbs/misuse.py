"""Errors for misuse of a step's verbs, with the line of the user's code and the remedy."""

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import keras
import tensorflow as tf

from ddl.errors import ConfigError, did_you_mean
from ddl.user_code import place_of

NO_LIST = (
    "Gradients are not a list. Use of(layer) for the gradients of some variables, or "
    "map(function), which calls function(gradient, variable) for each variable."
)


class NoSuchName(ConfigError, AttributeError):
    """An attribute that does not exist; `hasattr` returns False, as for other objects."""


class Guarded:
    """Base class of the objects that a step gets: an unknown attribute raises a ConfigError."""

    _called: ClassVar[str]
    """Name of the object in errors, such as "update"."""

    _offered: ClassVar[tuple[str, ...]] = ()
    """Names of the attributes that a step may use."""

    if not TYPE_CHECKING:  # else a type checker would accept every name

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):  # asked for by Python, copy and pickle
                raise AttributeError(name)
            raise NoSuchName(self._refusal(name))

    def _refusal(self, name: str) -> str:
        """Returns the message for an attribute that does not exist."""
        return (
            f"{self._called}.{name} does not exist.{did_you_mean(name, self._offered)} The "
            f"attributes of {self._called} are {', '.join(self._offered)}."
        )


class MustEnter:
    """A context manager that counts whether its `with` block was entered."""

    def __init__(self, manager: AbstractContextManager[None], waiting: list["MustEnter"]):
        """Keeps the arguments.

        Args:
          manager: The context manager.
          waiting: Holds this object until its block is entered.
        """
        self._manager = manager
        self._waiting = waiting
        waiting.append(self)

    def __enter__(self) -> None:
        self._waiting.remove(self)
        return self._manager.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._manager.__exit__(*error)


@contextmanager
def explained(task: Any, classes: dict[str, type]) -> Iterator[None]:
    """Converts errors of a task's step in the `with` block, and adds the user's line to them.

    Args:
      task: The task.
      classes: Classes of the objects that the step gets, by their names in errors.

    Raises:
      ConfigError: Instead of Python's own error, if the step branches on a tensor in Python, calls
        a verb with other arguments, or reads an attribute that the task does not have.
    """
    try:
        yield
    except ConfigError as error:
        _add_place(error, error)
        raise
    except Exception as error:
        message = _converted(error, task, classes)
        if message is None:
            raise
        converted = ConfigError(message)
        _add_place(converted, error)
        raise converted from error


def scalar(number: Any) -> tf.Tensor | float:
    """Returns a factor of gradients; raises ConfigError if it is not a scalar."""
    if isinstance(number, int | float):
        return tf.constant(number, tf.float64)
    wanted = "Gradients can be multiplied by a number or a scalar tensor"
    try:
        tensor = tf.convert_to_tensor(number)
    except (TypeError, ValueError):
        tensor = None
    if tensor is None or not (tensor.dtype.is_floating or tensor.dtype.is_integer):
        raise ConfigError(f"{wanted}, got {number!r:.80}.")
    if tensor.shape.rank != 0:
        raise ConfigError(
            f"{wanted}, got the shape {tuple(tensor.shape)}. Use `map` to change each gradient "
            "separately."
        )
    return tensor


def mapped(result: Any, variable: keras.Variable) -> tf.Tensor:
    """Returns the result of a `map`; raises ConfigError if it differs in shape or dtype."""
    if not tf.is_tensor(result):
        raise ConfigError(
            f"Gradients.map: the function must return a tensor for {variable.path}, got "
            f"{result!r:.80}."
        )
    given = result.dtype, tuple(result.shape)
    wanted = tf.as_dtype(variable.dtype), tuple(variable.shape)
    if given != wanted:
        raise ConfigError(
            f"Gradients.map: the function must return {wanted[0].name} {wanted[1]} for "
            f"{variable.path}, as the gradient is, got {given[0].name} {given[1]}."
        )
    return result


def _converted(error: Exception, task: Any, classes: dict[str, type]) -> str | None:
    """Returns the message for a misuse that Python or TensorFlow reports; None for other errors."""
    name, text = type(task).__name__, str(error)
    if _needs_a_value(error, text):
        return (
            f"{name}.step uses a tensor where Python needs a value, such as in `if` or `for`: the "
            "step is traced once, before any value is known. Use update.when(condition, function), "
            "or a Python `for` over a range."
        )
    called = re.match(r"(\w+)\.(\w+)\(\) (.*)", text)
    of = {kind.__name__: what for what, kind in classes.items()}
    if isinstance(error, TypeError) and called and called[1] in of:
        what, verb = of[called[1]], called[2]
        taken = _arguments(getattr(classes[what], verb))
        return f"{name}.step: {what}.{verb} takes {taken}, but the call {_given(called[3])}."
    if isinstance(error, AttributeError) and error.obj is task and error.name:
        known = [attribute for attribute in dir(task) if not attribute.startswith("_")]
        return f"{name} has no attribute {error.name!r}.{did_you_mean(error.name, known)}"
    return None


def _needs_a_value(error: Exception, text: str) -> bool:
    if isinstance(error, tf.errors.OperatorNotAllowedInGraphError):
        return True
    if isinstance(error, NotImplementedError):
        return "symbolic tf.Tensor" in text
    if isinstance(error, AttributeError):
        return error.name == "numpy" and tf.is_tensor(error.obj)
    return isinstance(error, TypeError) and "'SymbolicTensor'" in text


def _arguments(function: Callable[..., Any]) -> str:
    """Returns the arguments of a method without types, such as "(loss, batch, *, name=None)"."""
    function = inspect.unwrap(function)
    own = list(inspect.signature(function).parameters.values())[1:]
    bare = [one.replace(annotation=inspect.Parameter.empty) for one in own]
    return str(inspect.Signature(bare))


def _given(text: str) -> str:
    """Returns how a call is wrong, in Python's words."""
    words = {
        "missing": "is missing",
        "got an unexpected": "has the unexpected",
        "got multiple": "has multiple",
    }
    for start, ours in words.items():
        if text.startswith(start):
            return ours + text.removeprefix(start)
    return "has too many positional arguments"


def _add_place(error: ConfigError, cause: Exception) -> None:
    place = place_of(cause)
    if place is not None:
        error.args = (f"{error}\n{place.note}",)
