"""Standard streams, whose failed writes are dropped."""

import os
import sys
from contextlib import suppress
from typing import Any, TextIO, cast

_program = "ddl"


class Dropping:
    """A text stream that drops what it cannot write: the disk is full, or the reader has ended.

    All other attributes are those of the wrapped stream.
    """

    def __init__(self, stream: TextIO):
        """Wraps a stream."""
        self._stream = stream

    def write(self, text: str) -> int:
        """Writes a text. Never raises."""
        with suppress(OSError, ValueError):  # ValueError: closed, or an encoding lacks a character
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flushes the stream. Never raises."""
        with suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def protect_standard_streams(program: str) -> None:
    """Makes sys.stdout and sys.stderr drop failed writes, also those at the end of the process.

    A standard stream that is closed is opened on /dev/null: a file opened later would otherwise get
    its descriptor, and the messages of libraries.

    Args:
      program: Name of the command, which begins the lines of `say`.
    """
    global _program
    _program = program
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free descriptor
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError):  # no file: None, or a stand-in of a notebook
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    sys.stdout, sys.stderr = cast(TextIO, dropping(sys.stdout)), cast(TextIO, dropping(sys.stderr))


def dropping(stream: Any) -> Dropping:
    """Wraps a standard stream, once."""
    if isinstance(stream, Dropping):
        return stream
    # A standard stream is None if it was closed before Python started.
    return Dropping(open(os.devnull, "w") if stream is None else stream)


def say(text: str) -> None:
    """Prints a line, or lines, of this process's command to standard error. Never raises."""
    stream = dropping(sys.stderr)
    stream.write(f"{_program}: {printable(text)}\n")
    stream.flush()


def printable(text: str) -> str:
    """Escapes control characters, which a terminal obeys; keeps newlines and tabs."""
    return "".join(
        one if one.isprintable() or one in "\n\t" else one.encode("unicode_escape").decode()
        for one in text
    )
