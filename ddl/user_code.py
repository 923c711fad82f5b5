"""Attribution of errors to the user's own code: the modules of a config, its tasks and functions.

Such an error repeats at each start, so a launcher must not restart the command. Failures of the
system may pass: they stay as they are, and so do errors that no line of the user's raised.
"""

import contextlib
import dataclasses
import linecache
import os
import re
import sysconfig
import traceback
from collections.abc import Collection, Iterator

from ddl.errors import ConfigError, DdlError

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
_KERAS_MESSAGE = re.compile(r"^Exception encountered when calling .*?\x1b\[1m(.*?)\x1b\[0m", re.S)


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
        text = text.split("[[{{node")[0].strip().splitlines()[-1].strip()
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
    return not is_of_library(file)


def is_of_library(file: str) -> bool:
    """Returns whether a file is of ddl, Python or an installed package; notebooks are not."""
    file = os.path.abspath(file)
    return bool(file.startswith(_LIBRARIES) or _INSTALLED.search(file))
