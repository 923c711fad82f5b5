"""Quiet start-up: TensorFlow's start-up messages do not reach standard error.

TF_CPP_MIN_LOG_LEVEL silences most of them. TensorFlow's libraries ignore this setting while they
are being loaded and log directly to the file descriptor of standard error
(https://github.com/abseil/abseil-cpp/pull/1957). For the few seconds of start-up this descriptor
therefore leads to a filter (`ddl.cli.message_filter`), which drops the known messages and passes on
every other line. The filter is a process: a thread would lose the last lines of a process that
aborts.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from ddl.cli import message_filter


@contextlib.contextmanager
def quiet_start_up() -> Iterator[None]:
    """Drops TensorFlow's information and warnings within the `with` block.

    Passes all other output on at once. Does nothing if TF_CPP_MIN_LOG_LEVEL asks for information
    (0) or warnings (1), or if the filter cannot be started.
    """
    if os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2") in ("0", "1"):
        yield
        return
    process: subprocess.Popen[bytes] | None = None
    try:
        with contextlib.ExitStack() as opened:
            writing, is_done, process = _start_filter(opened)
            if process is None:
                yield
                return
            _flush()
            original = os.dup(2)
            opened.callback(os.close, original)
            os.dup2(writing, 2)
            try:
                yield
            finally:
                _flush()
                with contextlib.suppress(OSError):  # the filter was killed
                    os.write(2, message_filter.END)
                os.dup2(original, 2)
                os.read(is_done, 1)  # returns when the filter closes it
    finally:
        if process is not None:
            # It stays as long as a process that was started in the block has the descriptor.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1)


def _start_filter(opened: contextlib.ExitStack) -> tuple[int, int, subprocess.Popen[bytes] | None]:
    """Starts a filter that writes to standard error.

    Args:
      opened: Closes the returned descriptors.

    Returns:
      The descriptor to write to, one that the filter closes at the end, and the process; None if
      it could not be started.
    """
    reading, writing = os.pipe()
    is_done, done = os.pipe()
    opened.callback(os.close, writing)
    opened.callback(os.close, is_done)
    command = [sys.executable, "-I", "-S", str(Path(message_filter.__file__)), str(done)]
    try:
        # In a session of its own: whoever ends the process group of this process, as the launcher
        # does, must not end the filter before it has passed everything on.
        process = subprocess.Popen(
            command, stdin=reading, stdout=2, stderr=2, pass_fds=[done], start_new_session=True
        )
    except OSError:
        return writing, is_done, None
    finally:
        os.close(reading)
        os.close(done)
    return writing, is_done, process


def _flush() -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or None
        sys.stderr.flush()
