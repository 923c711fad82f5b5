"""Errors for the person who started the run: each names the problem, the place and the remedy.

``ddl.main`` prints the message of such an error without a traceback and exits with its
``exit_status``. Any other exception is a bug or a system failure: it keeps its traceback, and the
process exits with `UNEXPECTED_STATUS`.
"""

import difflib
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

# EX_SOFTWARE in sysexits.h. A restart may succeed, for example after the memory was full.
UNEXPECTED_STATUS = 70


class DdlError(Exception):
    """Base class of all errors for the person who started the run.

    Attributes:
      exit_status: The exit status of a command that ends with this error.
    """

    exit_status = 1


class ConfigError(DdlError, ValueError):
    """An invalid value, binding or flag."""


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Checks that `value` is one of `choices`.

    Raises:
      ConfigError: If it is not; the message begins with `name`.
    """
    if value not in choices:
        raise ConfigError(f"{name} must be {either(map(repr, choices))}, got {value!r}.")


def check_no_text(name: str, value: object) -> None:
    """Checks that an argument that takes a list of texts is not a single text.

    Python would read a single text letter by letter.

    Args:
      name: Name of the argument, such as `LARS.exclude`.
      value: The argument.

    Raises:
      ConfigError: If `value` is a text; the message begins with `name`.
    """
    if isinstance(value, str | bytes):
        raise ConfigError(f"{name} must be a list, got the text {value!r:.80}. Write {[value]}.")


def check_takes(
    name: str, function: Callable[..., Any], arguments: Sequence[str], named: Sequence[str] = ()
) -> None:
    """Checks that a function of the user's can be called with some arguments.

    Args:
      name: Name of the function for the error, such as `Source.decode`.
      function: The function; one whose signature cannot be read passes.
      arguments: Names of the arguments that are passed by position.
      named: Names of the arguments that are passed by name.

    Raises:
      ConfigError: If the function takes other arguments; names the file and line that define it.
    """
    taken = ", ".join([*arguments, *named])
    wanted = f"{name} must be a function {f'of ({taken})' if taken else 'without arguments'}"
    if not callable(function):
        raise ConfigError(f"{wanted}, got {function!r:.80}.")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*arguments, **dict.fromkeys(named))
    except TypeError:
        raise ConfigError(
            f"{wanted}, got {definition_of(function)}{signature}. Change its arguments."
        ) from None


def installing(extra: str) -> str:
    """Returns the sentence that says how to install an optional dependency.

    Args:
      extra: Name of the extra in pyproject.toml.
    """
    return f"In the checkout of ddl, run: pip install '.[{extra}]'."


def definition_of(function: Callable[..., Any]) -> str:
    """Returns the name of a function, preceded by its file and line if they are known."""
    function = inspect.unwrap(function)
    name = getattr(function, "__name__", type(function).__name__)
    code = getattr(function, "__code__", getattr(type(function).__call__, "__code__", None))
    return name if code is None else f"{code.co_filename}:{code.co_firstlineno}: {name}"


class DataError(DdlError, ValueError):
    """Data that are missing, or that do not fit the task."""


class DeviceError(DdlError, RuntimeError):
    """A device or a strategy that is unavailable, or that can no longer be set up."""


class AddressTaken(DdlError, RuntimeError):
    """The cluster address of this process is in use; a restart may get another one."""

    exit_status = UNEXPECTED_STATUS


class ModelDirectoryError(DdlError, RuntimeError):
    """A model directory, or a checkpoint or file in it, that cannot be read or written."""


class NotReady(ModelDirectoryError):
    """A model directory that another process still uses, or that has no checkpoint yet.

    The same command may succeed later, so its status is not that of an error to correct.
    """

    exit_status = UNEXPECTED_STATUS


class TrainingInterrupted(DdlError):
    """Training or prediction saved and stopped on a signal; the same command resumes it."""

    exit_status = 75


class WorkerLost(DdlError, RuntimeError):
    """Another worker of the cluster did not join, died or stalled; all workers must restart."""

    exit_status = 77


class TrainingDiverged(DdlError, ArithmeticError):
    """The loss or the gradients are no longer finite."""

    exit_status = 76


def either(names: Iterable[str]) -> str:
    """Joins names as `a`, `a or b`, `a, b or c`."""
    *most, last = names
    return f"{', '.join(most)} or {last}" if most else last


def did_you_mean(word: str, candidates: Iterable[str], cutoff: float = 0.75) -> str:
    """Returns ` Did you mean x?` with its leading space, or "" without a similar candidate.

    The comparison ignores case: `sgd` finds `SGD`.

    Args:
      word: The given name.
      candidates: The known names.
      cutoff: Least similarity from 0 to 1, as in `difflib.get_close_matches`.
    """
    by_lower = {one.lower(): one for one in reversed(list(candidates)) if one != word}
    # float16 means mixed_float16 rather than float64.
    ends = [one for one in by_lower if word and one.endswith(f"_{word.lower()}")]
    close = difflib.get_close_matches(word.lower(), list(by_lower), n=3, cutoff=cutoff)
    found = [by_lower[one] for one in dict.fromkeys([*ends, *close])][:3]
    return f" Did you mean {either(found)}?" if found else ""
