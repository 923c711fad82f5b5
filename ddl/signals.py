"""Stopping on request: at the first SIGTERM or SIGINT a run saves and ends, at the second it ends.

Python answers a signal between two of its own instructions, and a training loop is one call that
may take long. So a thread waits for signals beside it.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def keeping_answers() -> Iterator[None]:
    """Gives SIGTERM and SIGINT back the answers that they had before the `with` block.

    TensorFlow takes SIGTERM as it joins a cluster, and does nothing then. Main thread only.
    """
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


class StopSignals:
    """Within the `with` block the first signal is noted; a second one ends the process at once.

    The status is then 128 + the signal's number, as in a shell.
    """

    def __init__(self, answer: Callable[[], None]) -> None:
        """Nothing received yet.

        Args:
          answer: Called, from a thread of its own, when the first signal comes.
        """
        self.received: signal.Signals | None = None
        self._answer = answer

    def __enter__(self) -> "StopSignals":
        """Takes the signals over. Main thread only."""
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        # Every signal that Python handles writes its number there as soon as it comes.
        self._previous_descriptor = signal.set_wakeup_fd(self._writing)
        self._previous: dict[int, Any] = {
            number: signal.signal(number, _handle) for number in _SIGNALS
        }
        self._thread = threading.Thread(target=self._watch, name="signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Gives them back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_descriptor)
        os.close(self._writing)  # which ends the thread
        self._thread.join()
        os.close(self._reading)

    def _watch(self) -> None:
        while numbers := os.read(self._reading, 64):
            for number in numbers:
                if number in _SIGNALS:
                    self._note(signal.Signals(number))

    def _note(self, number: signal.Signals) -> None:
        if self.received is not None:
            os._exit(128 + number)
        self.received = number
        self._answer()


def _handle(number: int, frame: FrameType | None) -> None:
    """Does nothing: that there is a handler makes Python write to the descriptor."""
