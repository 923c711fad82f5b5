"""Stopping on a signal: a run saves and exits at the first SIGTERM or SIGINT.

Without a run, as in a notebook, an interrupt ends the training loop, and then Python raises
KeyboardInterrupt.

Python handles a signal only between two of its own instructions, and a training loop is a single
call that may take long. A separate thread therefore waits for signals.
"""

import _thread
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from ddl.output import say

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def keeping_handlers() -> Iterator[None]:
    """Restores the handlers of SIGTERM and SIGINT after the `with` block. Main thread only.

    TensorFlow replaces the handler of SIGTERM when it joins a cluster, and then ignores the signal.
    """
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextmanager
def deferring_interrupt(
    answer: Callable[[], None] = lambda: None, withdraw: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Defers Python's KeyboardInterrupt to the end of the `with` block.

    Python would raise it between two of its own instructions: after TensorFlow returns from a
    training loop and before the loop's result is stored. Does nothing outside of the main thread,
    or if SIGINT has a handler other than Python's own. Further interrupts within the block have no
    effect; the handler of SIGTERM does not change.

    Args:
      answer: Called from a separate thread at the first SIGINT.
      withdraw: Called after the block if a SIGINT was received; undoes `answer`, which may have run
        too late to take effect.

    Raises:
      KeyboardInterrupt: If a SIGINT was received and the block itself raised no error.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signals = StopSignals(answer, (signal.SIGINT,), may_end=False)
    try:
        with signals:
            yield
    finally:
        if signals.received is not None:
            withdraw()
    if signals.received is not None:
        raise KeyboardInterrupt


class StopSignals:
    """A context manager that records the first signal; later ones do not cut off a save.

    The second SIGINT says so. A third one ends the process at once, with status 130.

    Attributes:
      received: The first signal received; None if there was none.
    """

    def __init__(
        self,
        answer: Callable[[], None],
        numbers: Sequence[signal.Signals] = _SIGNALS,
        may_end: bool = True,
    ) -> None:
        """Installs no handler yet.

        Args:
          answer: Called from a separate thread at the first signal.
          numbers: The signals to handle.
          may_end: Whether a third SIGINT ends the process; otherwise later ones have no effect.
        """
        self.received: signal.Signals | None = None
        self._answer: Callable[[], None] | None = answer
        self._answering = threading.Lock()
        self._numbers = numbers
        self._may_end = may_end
        self._previous: dict[int, Any] | None = None

    def __enter__(self) -> "StopSignals":
        """Installs the handlers; in another thread than the main one, none."""
        if threading.current_thread() is not threading.main_thread():
            return self
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        # Python's C handler writes the number of each signal to this descriptor at once.
        self._previous_descriptor = signal.set_wakeup_fd(self._writing)
        self._previous = {number: signal.signal(number, self._handle) for number in self._numbers}
        # `threading.Thread` would wait for the start and the end of the thread. While TensorFlow
        # keeps the cores busy, each wait would cost a short block more than a millisecond.
        _thread.start_new_thread(self._watch, (self._reading,))
        return self

    def __exit__(self, *error: object) -> None:
        """Restores the previous handlers and ends the thread."""
        if self._previous is None:
            return
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_descriptor)
        os.close(self._writing)  # ends the thread
        with self._answering:
            self._answer = None  # signals that the thread has not read yet get no answer

    def _watch(self, reading: int) -> None:
        received = 0
        while numbers := os.read(reading, 64):
            for number in filter(self._numbers.__contains__, numbers):
                with self._answering:
                    if not received and self._answer is not None:
                        self.received = signal.Signals(number)
                        self._answer()
                received += not received or number == signal.SIGINT
                if self._may_end and received == 2:
                    say("Stopping after the work in progress; a third SIGINT ends it unsaved.")
                elif self._may_end and received > 2:
                    os._exit(128 + number)
        os.close(reading)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Records the signal; Python calls this between two instructions, within the block."""
        if self.received is None:
            self.received = signal.Signals(number)
