"""The starts of a run, from its TensorBoard event files; imports no TensorFlow."""

import re
import struct
from pathlib import Path
from typing import NamedTuple

from google.protobuf.message import DecodeError
from tensorboard.compat.proto.event_pb2 import Event

from ddl.files import open_itself

_NAME = re.compile(r"events\.out\.tfevents\.(\d+)\.(.*)")
_MOST_FILES, _LONGEST_RECORD = 1000, 2**20


class Start(NamedTuple):
    """A process that trained.

    Attributes:
      time: When it began to write, in seconds since 1970.
      step: Step of its first log; None if it is unknown.
    """

    time: float
    step: int | None


def starts(run: Path, rewinds: int) -> list[Start]:
    """Returns the starts of a run, in order of time.

    Each process that trains writes an event file of its own with its first log, and another one
    after a rewind. A process that ended before its first log left none.

    Args:
      run: The directory of the run.
      rewinds: Number of rewinds that the run has recorded.
    """
    files: dict[str, list[tuple[Start, Path]]] = {}
    for path in sorted((run / "train").glob("events.out.tfevents.*"))[:_MOST_FILES]:
        if name := _NAME.fullmatch(path.name):
            # Host and process number; the rest counts the files of the process.
            process = re.sub(r"\.\d+\.v2$", "", name[2])
            files.setdefault(process, []).append((_first(path, int(name[1])), path))
    found, later = [], []
    for of_process in files.values():
        first, *others = sorted((start for start, _ in of_process), key=_in_time)
        found.append(first)
        later += others
    # In containers all processes may have the same host and number: then rewinds tell them apart.
    found += sorted(later, key=_in_time)[: max(0, len(later) - rewinds)]
    return sorted(found, key=_in_time)


def _in_time(start: Start) -> tuple[float, bool, int]:
    """Returns the sort key of a start: of one second, those without a known step come last."""
    return start.time, start.step is None, start.step or 0


def _first(path: Path, time: int) -> Start:
    """Returns time and step of the first summary in an event file."""
    try:
        with open(path, "rb", opener=open_itself) as file:
            for _ in range(4):  # the first record is the version of the format
                header = file.read(12)
                if len(header) < 12:
                    break
                (length,) = struct.unpack("<Q", header[:8])
                if length > _LONGEST_RECORD:
                    break
                event = Event.FromString(file.read(length))
                file.read(4)
                if event.HasField("summary"):
                    return Start(float(time), event.step)
    except (OSError, DecodeError):
        pass
    return Start(float(time), None)
