"""Times and copies of a GPU, read from TensorFlow's profiler."""

import contextlib
import dataclasses
import re
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

_DEVICE = re.compile(r"/device:GPU:\d+")
_COPY = re.compile(r"Memcpy *(H2D|D2H|D2D|P2P)|Memcpy *(HtoD|DtoH|DtoD|PtoP)", re.IGNORECASE)
_SIZE = re.compile(r"(?:size|num_bytes):(\d+)")


@dataclasses.dataclass(frozen=True)
class Event:
    """A kernel or copy: its name, start and end in seconds, and the bytes that a copy moves."""

    name: str
    start: float
    end: float
    copied: int = 0

    @property
    def kind(self) -> str:
        """One of "H2D", "D2H", "D2D" and "P2P" for a copy; "" for anything else."""
        found = _COPY.search(self.name)
        return (found[1] or found[2].replace("to", "2")).upper() if found else ""


@dataclasses.dataclass(frozen=True)
class DeviceTrace:
    """Events of the first GPU, sorted by their start."""

    events: tuple[Event, ...]

    @property
    def span(self) -> float:
        """Seconds from the start of the first event to the end of the last."""
        return max((e.end for e in self.events), default=0.0) - self._begin

    @property
    def busy(self) -> float:
        """Seconds in which at least one event was under way."""
        total, end = 0.0, self._begin
        for event in self.events:
            total += max(0.0, event.end - max(event.start, end))
            end = max(end, event.end)
        return total

    @property
    def idle(self) -> float:
        """Seconds between the first event and the last in which nothing was under way."""
        return self.span - self.busy

    @property
    def kernels(self) -> int:
        """Number of events that copy nothing."""
        return sum(not event.kind for event in self.events)

    def copies(self, kind: str) -> int:
        """Number of copies of a kind, such as "H2D"."""
        return sum(event.kind == kind for event in self.events)

    def copied(self, kind: str) -> int:
        """Bytes of all copies of a kind."""
        return sum(event.copied for event in self.events if event.kind == kind)

    @property
    def _begin(self) -> float:
        return self.events[0].start if self.events else 0.0


def traced(call: Callable[[], object]) -> DeviceTrace | None:
    """Profiles a call.

    Returns:
      The trace of the first GPU; None if the profiler saw none, or cannot run.
    """
    import tensorflow as tf

    with tempfile.TemporaryDirectory(prefix="trace") as folder:
        try:
            tf.profiler.experimental.start(folder)
        except tf.errors.OpError:
            return None
        try:
            call()
        finally:
            with contextlib.suppress(tf.errors.OpError):
                tf.profiler.experimental.stop()
        files = sorted(Path(folder).rglob("*.xplane.pb"))
        return read(file.read_bytes() for file in files)


def read(contents: Iterable[bytes]) -> DeviceTrace | None:
    """Reads serialized profiles; None if none of them has a GPU with events."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    for content in contents:
        for plane in xplane_pb2.XSpace.FromString(content).planes:
            if _DEVICE.search(plane.name) and (events := _events(plane)):
                return DeviceTrace(tuple(sorted(events, key=lambda event: event.start)))
    return None


def _events(plane: Any) -> list[Event]:
    """Returns the events on the streams of a GPU; other lines repeat them in summary."""
    found = []
    for line in plane.lines:
        if not line.name.startswith("Stream"):
            continue
        for event in line.events:
            start = line.timestamp_ns * 1e-9 + event.offset_ps * 1e-12
            name = plane.event_metadata[event.metadata_id].name
            text = " ".join(_text(stat, plane) for stat in event.stats)
            size = _SIZE.search(text)
            copied = int(size[1]) if size else 0
            found.append(Event(name, start, start + event.duration_ps * 1e-12, copied))
    return found


def _text(stat: Any, plane: Any) -> str:
    """Returns a statistic's text, which may stand once for all events."""
    if stat.WhichOneof("value") == "ref_value":
        return plane.stat_metadata[stat.ref_value].name
    return stat.str_value
