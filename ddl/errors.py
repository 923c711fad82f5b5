"""Errors for the person who started the run: each names the problem, the place and the remedy.

``ddl.main`` prints the message of such an error without a traceback and exits with its
``exit_status``. Any other exception is a bug or a system failure: it keeps its traceback, and the
process exits with `UNEXPECTED_STATUS`.

Errors of the user's own code, the modules of a config, its tasks and functions, are attributed to
its line. Such an error repeats at each start, so a launcher must not restart the command. Failures
of the system may pass: they stay as they are, and so do errors that no line of the user's raised.
"""

import contextlib
import dataclasses
import difflib
import inspect
import linecache
import os
import re
import sysconfig
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

# EX_SOFTWARE in sysexits.h. A restart may succeed, for example after the memory was full.
UNEXPECTED_STATUS = 70

# Errors of the system that repeat: the user's code names a file that it cannot open.
_LASTING = (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)
_PASSING = (OSError, MemoryError, BufferError)
# TensorFlow's errors that say that an operation got wrong values. All others may pass.
_WRONG_VALUES = ("InvalidArgumentError", "UnimplementedError", "OutOfRangeError", "NotFoundError")

_LIBRARIES = tuple(
    os.path.join(os.path.abspath(folder), "")
    for folder in (os.path.dirname(__file__), *map(sysconfig.get_path, ("stdlib", "platstdlib")))
)
_INSTALLED = re.compile(r"[\\/](?:site|dist)-packages[\\/]")
# AutoGraph and TensorFlow's kernels put frames into the message. Keras puts the message between
# control sequences.
_FRAME_IN_TEXT = re.compile(r'^ +File "(.+)", line (\d+), in .*$', re.MULTILINE)
_NO_REASON = re.compile(r"Graph execution error|Detected at node|<stack traces| +File |\s*$")
_KERAS_MESSAGE = re.compile(r"^Exception encountered when calling .*?\x1b\[1m(.*?)\x1b\[0m", re.S)


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


@dataclasses.dataclass(frozen=True)
class Place:
    """A line of a Python file."""

    file: str
    line: int

    def __str__(self) -> str:
        shown = os.path.relpath(self.file)
        return f"{self.file if shown.startswith('..') else shown}:{self.line}"

    @property
    def note(self) -> str:
        """Two lines for the end of a message: the place, and its line."""
        return f"  raised in {self}\n    {self.text}"

    @property
    def text(self) -> str:
        """The line itself, stripped; empty if the file cannot be read."""
        return linecache.getline(self.file, self.line).strip()


def repeats(error: BaseException) -> bool:
    """Returns whether the same code would raise the error again."""
    if isinstance(error, _LASTING):
        return True
    # By name: the check of a config must not import TensorFlow.
    kinds = type(error).__mro__
    if any((k.__name__, k.__module__.split(".")[0]) == ("OpError", "tensorflow") for k in kinds):
        return any(kind.__name__ in _WRONG_VALUES for kind in kinds)
    return isinstance(error, Exception) and not isinstance(error, _PASSING)


def place_of(error: BaseException, packages: Collection[str] = ()) -> Place | None:
    """Returns the innermost line of the user's code that raised the error; None if there is none.

    Args:
      error: The error, with its traceback.
      packages: Installed packages that are the user's. All that lies outside of ddl, Python and the
        installed packages is the user's anyway.
    """
    if isinstance(error, SyntaxError) and error.filename and is_of_user(error.filename):
        return Place(error.filename, error.lineno or 0)
    frames = [
        (frame.f_code.co_filename, line, str(frame.f_globals.get("__name__", "")))
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    frames += [(file, int(line), "") for file, line in _FRAME_IN_TEXT.findall(str(error))]
    for file, line, module in reversed(frames):
        if is_of_user(file) or (module.partition(".")[0] in packages and os.path.isfile(file)):
            return Place(file, line)
    return None


def message_of(error: BaseException) -> str:
    """Returns the type and message of an error, without the frames of Keras and AutoGraph."""
    text = str(error).strip()
    if keras := _KERAS_MESSAGE.match(text):
        text = keras[1].strip()
    if text.startswith("Graph execution error"):  # the reason stands between frames and node
        lines = text.split("[[{{node")[0].splitlines()
        text = "\n".join(x.strip() for x in lines if not _NO_REASON.match(x))
    if text.startswith("in user code:"):
        text = _FRAME_IN_TEXT.split(text)[-1].partition("\n\n")[2].strip()
        text = text.removeprefix(f"{type(error).__name__}: ")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@contextlib.contextmanager
def attributing_errors(packages: Collection[str] = ()) -> Iterator[None]:
    """Converts errors of the user's code in the `with` block into a ConfigError with the line.

    Args:
      packages: As in `place_of`.

    Raises:
      ConfigError: If the block raises an error that repeats, from a line of the user's code.
      RuntimeError: If it calls `sys.exit` without a status, as if the command were done.
    """
    try:
        yield
    except DdlError:
        raise
    except SystemExit as error:
        if error.code:
            raise
        raise RuntimeError("sys.exit() was called before the command was done.") from error
    except Exception as error:
        place = place_of(error, packages) if repeats(error) else None
        if place is None:
            raise
        raise ConfigError(f"{place} raised {message_of(error)}\n    {place.text}") from error


def is_of_user(file: str) -> bool:
    """Returns whether a file is the user's: not of ddl, Python or an installed package."""
    if file.startswith("<") or "__autograph_generated_file" in file or not os.path.isfile(file):
        return False
    file = os.path.abspath(file)
    return not (file.startswith(_LIBRARIES) or _INSTALLED.search(file))
