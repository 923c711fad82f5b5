"""Contenders in separate processes that compute one at a time.

A contender is a function (case, turns) in a module that may load TensorFlow. Its process stays
alive over several cases, so that the windows of several processes can be interleaved while only
one process computes.
"""

import contextlib
import importlib
import multiprocessing
import os
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.repeats import seconds

_TIMEOUT_SECONDS = 1800  # only ends what hangs


class Failed(Exception):
    """A contender cannot run a case; the message says why."""


class Turns:
    """The contender's end of the connection: waits for a turn and reports its figure."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._has_the_turn = False

    def wait(self) -> bool:
        """Waits for the turn; returns False when the case is over."""
        self._has_the_turn = self._connection.recv() == "go"
        return self._has_the_turn

    def report(self, value: Any) -> None:
        """Ends the turn and reports a figure; a string reports a failure."""
        self._connection.send(value)
        self._has_the_turn = False

    def take(self, window: Callable[[], object], parts: int = 1) -> None:
        """Times one window per turn until the case is over; reports its seconds over `parts`."""
        while self.wait():
            self.report(seconds(window) / parts)

    def give_up(self, text: str) -> None:
        """Reports a failure in every turn until the case is over."""
        while self._has_the_turn or self.wait():
            self.report(text)


class Contender:
    """The benchmark's end of the connection: starts and controls a contender's process."""

    def __init__(self, function: str, cases: Sequence[Any], environment: dict[str, str]) -> None:
        """Starts the process.

        Args:
          function: "module:name" of the contender's function.
          cases: The cases, in the order in which the function is called with them.
          environment: Environment variables set in the process.
        """
        self._connection, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(
            target=_serve, args=(function, cases, environment, theirs), daemon=True
        )
        self._process.start()
        theirs.close()

    def start_window(self) -> None:
        """Gives the process its turn."""
        with contextlib.suppress(OSError):  # if the process died, end_window raises
            self._connection.send("go")

    def end_window(self) -> Any:
        """Returns the figure that the process reports.

        Raises:
          Failed: If the process cannot run the case, died, or does not answer in time.
        """
        try:
            if not self._connection.poll(_TIMEOUT_SECONDS):
                raise Failed(f"no answer within {_TIMEOUT_SECONDS} s")
            value = self._connection.recv()
        except (EOFError, OSError) as error:
            raise Failed("its process died") from error
        if isinstance(value, str):
            raise Failed(value)
        return value

    def window(self) -> Any:
        """Runs one turn and returns its figure."""
        self.start_window()
        return self.end_window()

    def next_case(self) -> None:
        """Ends the case."""
        with contextlib.suppress(OSError):
            self._connection.send("next")

    def close(self) -> None:
        """Kills the process."""
        self._process.kill()
        self._process.join()


def _serve(
    function: str, cases: Sequence[Any], environment: dict[str, str], connection: Connection
) -> None:
    os.environ.update({"TF_CPP_MIN_LOG_LEVEL": "2", **environment})
    turns = Turns(connection)
    module, _, name = function.partition(":")
    for case in cases:
        try:
            getattr(importlib.import_module(module), name)(case, turns)
        except (EOFError, BrokenPipeError):
            return
        except Failed as error:
            turns.give_up(str(error))
        except Exception as error:
            traceback.print_exc()
            turns.give_up(f"{type(error).__name__}: {str(error).splitlines()[0][:200]}")
