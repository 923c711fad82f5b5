"""Types of the Trainer's arguments, which in a config are checked by their annotations."""

import numbers
from typing import Any

import numpy as np

from ddl.errors import ConfigError

_NUMBERS = {"an integer": numbers.Integral, "a number": numbers.Real}


def check_number(name: str, value: Any, wanted: str, *, optional: bool = False) -> None:
    """Raises ConfigError if an argument of the Trainer is not a number.

    Args:
      name: Name of the argument.
      value: Its value.
      wanted: `an integer` or `a number`.
      optional: Whether None is allowed.
    """
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, _NUMBERS[wanted]):
        raise ConfigError(_text(name, value, wanted + (", or None" if optional else "")))


def check_flag(name: str, value: Any, *, auto: bool = False) -> None:
    """Raises ConfigError if an argument of the Trainer is neither True nor False.

    Args:
      name: Name of the argument.
      value: Its value.
      auto: Whether "auto" is allowed.
    """
    if isinstance(value, (bool, np.bool_)) or (auto and isinstance(value, str) and value == "auto"):
        return
    raise ConfigError(_text(name, value, "True, False or 'auto'" if auto else "True or False"))


def check_instance(name: str, value: Any, kind: type, example: str, *, auto: bool = False) -> None:
    """Raises ConfigError if an argument of the Trainer is not None or an object of a class.

    Args:
      name: Name of the argument.
      value: Its value.
      kind: The class.
      example: Code that makes such an object.
      auto: Whether "auto" is allowed.
    """
    if (
        value is None
        or isinstance(value, kind)
        or (auto and isinstance(value, str) and value == "auto")
    ):
        return
    other = "'auto' or None" if auto else "or None"
    raise ConfigError(f"{_text(name, value, f'a {kind.__name__}, {other}')} Pass {example}.")


def _text(name: str, value: Any, wanted: str) -> str:
    return f"Trainer.{name} must be {wanted}, got {value!r:.80}."
