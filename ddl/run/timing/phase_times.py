"""The time of an update by phase, read from a profile of TensorFlow's profiler."""

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddl.files import open_itself

NAME = "phases.json"
"""File in the folder of a profile."""

PHASES = {
    "forward": "forward pass",
    "backward": "backward pass",
    "all_reduce": "all-reduce",
    "update": "clipping and optimizer",
    "other": "other operations",
}
"""Phases as they are shown. `other` are data, metrics, the loop, and what cannot be told."""

LARGEST_PROFILE = 2**28
"""Bytes of a profile above which its phases are not read: that would take minutes."""

_LARGEST_FILE = 2**16
_GPU = re.compile(r"/device:GPU:\d+")
_OPERATION = re.compile(r"[\w.\-/>]+:_?[A-Z]\w*")
# Operations that hold others, which have events of their own.
_AROUND = re.compile(r":(?:While|If|Case|PartitionedCall|StatefulPartitionedCall)$")


@dataclasses.dataclass(frozen=True)
class PhaseTimes:
    """The time of an update by phase.

    Attributes:
      first: The step after which the profile begins.
      last: Its last step.
      devices: "GPUs", whose kernels are counted, or "CPUs", whose operations are.
      milliseconds: Time of an update by phase, in the order of `PHASES`; that of operations that
        run at the same time, such as on several replicas, is added up.
    """

    first: int
    last: int
    devices: str
    milliseconds: dict[str, float]

    def line(self) -> str:
        """Returns the times in one line."""
        total = sum(self.milliseconds.values()) or 1.0
        parts = [
            f"{PHASES[phase]} {time:,.3g} ms ({time / total:.0%})"
            for phase, time in self.milliseconds.items()
        ]
        return (
            f"Operations on {self.devices} in an update of steps {self.first:,} to {self.last:,}: "
            f"{', '.join(parts)}."
        )


def measured(folder: Path, first: int, last: int) -> PhaseTimes | None:
    """Reads the profile of some updates, and writes the times beside it.

    Args:
      folder: Folder of the profile, such as after-step-100.
      first: The step after which it begins.
      last: Its last step.

    Returns:
      The times; None if the profile has no operations of an update.

    Raises:
      OSError: If a file cannot be read or written.
      ValueError: If the profile is too large, or TensorFlow did not write it.
    """
    from google.protobuf.message import DecodeError
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    # The newest one: the same steps may be profiled again, after a rewind.
    paths = sorted(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime_ns)
    if not paths:
        return None
    path = paths[-1]
    if path.stat().st_size > LARGEST_PROFILE:
        raise ValueError(f"{path.name} has more than {LARGEST_PROFILE:,} bytes")
    try:
        planes = xplane_pb2.XSpace.FromString(path.read_bytes()).planes
    except DecodeError as error:
        raise ValueError(f"{path.name} is not a profile") from error
    on_gpus = [plane for plane in planes if _GPU.search(plane.name)]
    totals = dict.fromkeys(PHASES, 0)
    for plane in on_gpus or planes:
        _add(plane, totals, bool(on_gpus))
    if not sum(totals.values()) or last <= first:
        return None
    per_update = 1e9 * (last - first)  # from picoseconds to milliseconds
    times = {phase: round(total / per_update, 6) for phase, total in totals.items()}
    found = PhaseTimes(first, last, "GPUs" if on_gpus else "CPUs", times)
    (folder / NAME).write_text(json.dumps(dataclasses.asdict(found)) + "\n", encoding="utf-8")
    return found


def _add(plane: Any, totals: dict[str, int], on_gpu: bool) -> None:
    """Adds the times of a plane's events, in picoseconds."""
    from ddl.step.monitoring.phases import phase_of

    phases: dict[int, str | None] = {}
    for line in plane.lines:
        if on_gpu and not line.name.startswith("Stream"):
            continue  # these repeat the events of the streams in summary
        for event in line.events:
            number = event.metadata_id
            if on_gpu:
                texts = (_text(stat, plane) for stat in event.stats)
                found = next((p for text in texts if (p := phase_of(text))), None)
                totals[found or "other"] += event.duration_ps
                continue
            if number not in phases:
                name = plane.event_metadata[number].name
                is_one = _OPERATION.fullmatch(name) and not _AROUND.search(name)
                phases[number] = (phase_of(name) or "other") if is_one else None
            if (phase := phases[number]) is not None:
                totals[phase] += event.duration_ps


def _text(stat: Any, plane: Any) -> str:
    """Returns a statistic's text, which may stand once for all events."""
    if stat.WhichOneof("value") == "ref_value":
        return str(plane.stat_metadata[stat.ref_value].name)
    return str(stat.str_value)


def read(path: Path) -> PhaseTimes:
    """Reads the times that `measured` wrote.

    Raises:
      OSError: If the file cannot be read, or is a link.
      ValueError: If ddl did not write it.
    """
    with open(path, "rb", opener=open_itself) as file:
        content = file.read(_LARGEST_FILE + 1)
    try:
        values: Any = json.loads(content)
        times: Mapping[str, float] = values["milliseconds"]
        known = {phase: times[phase] for phase in PHASES}
        found = PhaseTimes(values["first"], values["last"], values["devices"], known)
        numbers = [found.first, found.last, *known.values()]
        if not all(type(one) in (int, float) and 0 <= one < 1e15 for one in numbers):
            raise ValueError
        if found.devices not in ("GPUs", "CPUs"):
            raise ValueError
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError("it is not as ddl writes it") from error
    return found
