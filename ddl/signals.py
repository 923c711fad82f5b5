"""Stopping on request: SIGTERM and SIGINT ask, between two loops the run answers."""

import signal
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """Within the `with` block the first signal is noted; a second one stops at once."""

    def __init__(self) -> None:
        """Nothing received yet."""
        self.received: signal.Signals | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        """Takes the signals over. Main thread only."""
        self._previous = {number: signal.signal(number, self._note) for number in _SIGNALS}
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

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        for other in _SIGNALS:
            signal.signal(other, signal.SIG_DFL)
