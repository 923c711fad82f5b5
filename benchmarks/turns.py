"""Contenders in processes of their own that compute by turns.

A contender is a function (case, turns) in a module that may load TensorFlow. Its process stays
alive over several cases, so that windows of several processes can be interleaved while only one
of them computes.
"""

import contextlib
import importlib
import multiprocessing
import os
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.report import seconds
from ddl.quiet import quiet_start_up

_TIMEOUT_SECONDS = 240


class Failed(Exception):
    """A contender cannot do a case; the text says why."""


class Turns:
    """In the contender's process: waits for its turn and reports what it took."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._has_the_turn = False

    def wait(self) -> bool:
        """Waits; False when the case is over."""
        self._has_the_turn = self._connection.recv() == "go"
        return self._has_the_turn

    def report(self, value: Any) -> None:
        """Ends the turn with what was measured; a text says that there is nothing."""
        self._connection.send(value)
        self._has_the_turn = False

    def take(self, window: Callable[[], object], parts: int = 1) -> None:
        """Times a window in each turn until the case is over, and reports the time of a part."""
        while self.wait():
            self.report(seconds(window) / parts)

    def give_up(self, text: str) -> None:
        """Waits for the end of the case, of which there is nothing to report."""
        while self._has_the_turn or self.wait():
            self.report(text)


class Contender:
    """In the benchmark's process: a contender's process, which it starts at once."""

    def __init__(self, function: str, cases: Sequence[Any], environment: dict[str, str]) -> None:
        """Starts it.

        Args:
          function: "module:name" of the function.
          cases: What it is called with, one after the other.
          environment: What is set for the process.
        """
        self._connection, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(
            target=_serve, args=(function, cases, environment, theirs), daemon=True
        )
        self._process.start()
        theirs.close()

    def start_window(self) -> None:
        """Gives it the turn."""
        with contextlib.suppress(OSError):  # where it has died, end_window says so
            self._connection.send("go")

    def end_window(self) -> Any:
        """What it reports.

        Raises:
          Failed: If it cannot do the case, has died, or does not answer.
        """
        try:
            if not self._connection.poll(_TIMEOUT_SECONDS):
                raise Failed(f"no answer within {_TIMEOUT_SECONDS} s")
            value = self._connection.recv()
        except (EOFError, OSError) as error:
            raise Failed("its process has died") from error
        if isinstance(value, str):
            raise Failed(value)
        return value

    def window(self) -> Any:
        """One turn."""
        self.start_window()
        return self.end_window()

    def next_case(self) -> None:
        """Ends the case."""
        with contextlib.suppress(OSError):
            self._connection.send("next")

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.join()


def _serve(
    function: str, cases: Sequence[Any], environment: dict[str, str], connection: Connection
) -> None:
    os.environ.update(environment)
    turns = Turns(connection)
    module, _, name = function.partition(":")
    for case in cases:
        try:
            with quiet_start_up():
                contender = getattr(importlib.import_module(module), name)
            contender(case, turns)
        except (EOFError, BrokenPipeError):
            return
        except Failed as error:
            turns.give_up(str(error))
        except Exception as error:
            traceback.print_exc()
            turns.give_up(f"{type(error).__name__}: {str(error).splitlines()[0][:200]}")
