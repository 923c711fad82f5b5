"""Speed on a GPU: python -m benchmarks.gpu.

The networks are the MLP of the second tutorial, the CNN of the third, ResNet-50 on images of
224×224 with 1,000 classes, and a GPT of 8 blocks of width 512 on 512 tokens out of 8,192. ddl is
compared with Keras's `fit`, which compiles, with Orbit's StandardTrainer, both with Keras's Adam
and their data from arrays in host memory, and with the bare step: compiled, on one constant batch,
without metrics.

The contenders of a case share a process, since a process for each would need the GPU's memory at
once; each case has several fresh processes. Idle time and kernels are read from TensorFlow's
profiler, in an extra window. `--only='MLP; GPT'` measures the cases whose names contain a text. No
further process starts after nine minutes, which makes commands of less than ten.
"""

import contextlib
import dataclasses
import math
import multiprocessing
import re
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import contenders, harness
from benchmarks.cases import Case
from benchmarks.harness import Cell, Options, Report, Table, Target, Window, spread

DDL, FIT, ORBIT, BARE = NAMES = ("ddl", "Keras fit", "Orbit", "bare step")
FUNCTIONS = {
    DDL: contenders.by_ddl,
    FIT: contenders.by_fit,
    ORBIT: contenders.by_orbit,
    BARE: contenders.compiled_floor,
}
CASES = (
    Case("MLP", 64, 200, 5, examples=25_600, gpu=True),
    *(
        Case("CNN", 512, 50, 2, examples=51_200, precision=precision, gpu=True)
        for precision in ("tf32", "mixed_bfloat16")
    ),
    *(
        Case("ResNet-50", 256, 5, 2, examples=2_560, precision=precision, gpu=True)
        for precision in ("tf32", "mixed_bfloat16")
    ),
    Case("GPT", 32, 10, 2, examples=640, precision="mixed_bfloat16", gpu=True),
)
PROCESSES, SECONDS = 3, 540
_KINDS = ("ms", "idle, ms", "kernels")


# ------------------------------------------------------------ a process


def traced(window: Window) -> tuple[float, int]:
    """Profiles a window; see `read`. NaN if the profiler cannot run."""
    import tensorflow as tf

    with tempfile.TemporaryDirectory(prefix="trace") as folder:
        try:
            tf.profiler.experimental.start(folder)
        except tf.errors.OpError:
            return math.nan, 0
        try:
            window()
        finally:
            with contextlib.suppress(tf.errors.OpError):
                tf.profiler.experimental.stop()
        return read(file.read_bytes() for file in sorted(Path(folder).rglob("*.xplane.pb")))


def read(contents: Iterable[bytes]) -> tuple[float, int]:
    """Reads serialized profiles.

    Returns:
      The seconds between the first event of the first GPU and the last in which nothing was under
      way, and the number of events that copy nothing; NaN and 0 if there is no GPU.
    """
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    planes = [plane for each in contents for plane in xplane_pb2.XSpace.FromString(each).planes]
    for plane in (plane for plane in planes if re.search(r"/device:GPU:\d+", plane.name)):
        events = []
        for line in (line for line in plane.lines if line.name.startswith("Stream")):
            for event in line.events:  # other lines repeat them in summary
                start = line.timestamp_ns * 1e-9 + event.offset_ps * 1e-12
                name = plane.event_metadata[event.metadata_id].name
                events.append((start, start + event.duration_ps * 1e-12, name))
        if events:
            idle, end = 0.0, min(events)[0]
            for start, until, _ in sorted(events):
                idle += max(0.0, start - end)
                end = max(end, until)
            return idle, sum("memcpy" not in name.lower() for *_, name in events)
    return math.nan, 0


def figures(case: Case) -> dict[str, Any]:
    """Builds all contenders of a case in this process, and measures them by turns.

    Returns:
      For each contender its `_KINDS` an update, or a text that says why it failed.
    """
    found: dict[str, Any] = {}
    windows: dict[str, Window] = {}
    for name, build in FUNCTIONS.items():
        try:
            windows[name] = build(case)
            windows[name]()
        except Exception as error:
            windows.pop(name, None)
            found[name] = str(error).partition("\n")[0][:200] or type(error).__name__
    for name, times in harness.interleaved(windows, 5).items():
        idle, kernels = traced(windows[name])
        # `fit` makes two epochs of fewer updates in a window.
        updates = 2 * case.steps if name == FIT else case.updates
        values = float(np.median(times)) * 1e3, idle * 1e3 / updates, kernels / updates
        found[name] = dict(zip(_KINDS, values, strict=True))
    return found


# ------------------------------------------------------------ the report


def measured(case: Case) -> Any:
    """Measures a case in a fresh process; a text says why it failed."""
    try:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            return pool.submit(figures, case).result()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def reported(found: dict[Case, list[dict[str, Any]]], notes: list[str]) -> Report:
    """Returns the report of what the processes of each case found."""
    rows: list[list[Cell]] = []
    each: list[list[Cell]] = []
    targets = []
    for case, runs in found.items():
        values = {
            name: {kind: np.array([run[name][kind] for run in runs]) for kind in _KINDS}
            for name in NAMES
            if all(isinstance(run[name], dict) for run in runs)
        }
        ratios: dict[str, Any] = {}
        if DDL in values:
            own = values[DDL]["ms"]
            ratios = {name: spread(of["ms"] / own) for name, of in values.items()}
            if BARE in values:
                ratios[BARE] = spread(own / values[BARE]["ms"])
                what = f"{case}: ddl's time / the bare step's"
                targets.append(Target(what, ratios[BARE], 1.05, "at most"))
            if FIT in values:
                targets.append(Target(f"{case}: ddl's speed / Keras fit's", ratios[FIT], 1.0))
        rows.append([str(case), *(ratios.get(name, "–") for name in (FIT, ORBIT, BARE))])
        each += [[f"{case}: {n}", *map(spread, of.values())] for n, of in values.items()]
        notes += [f"{case}, {n}: {runs[0][n]}." for n in NAMES if isinstance(runs[0][n], str)]
    title = "ddl's speed / the others'; its time / the bare step's"
    tables = [Table(title, ["", FIT, ORBIT, BARE], rows), Table("An update", ["", *_KINDS], each)]
    return Report(tables, targets, notes)


def measure(options: Options) -> Report:
    """Measures every case in one process, then in a second, and so on."""
    if not harness.gpus():
        raise SystemExit("benchmarks.gpu needs an NVIDIA GPU, and this machine has none.")
    cases = options.chosen(CASES)
    found: dict[Case, list[dict[str, Any]]] = {}
    notes: list[str] = []
    begin = time.monotonic()
    for _ in range(1 if options.quick else PROCESSES):
        for case in cases:
            if time.monotonic() - begin < SECONDS:
                run = measured(dataclasses.replace(case, longer=1) if options.quick else case)
                if isinstance(run, str):
                    notes.append(f"A process of {case} failed: {run}.")
                else:
                    found.setdefault(case, []).append(run)
    counts = ", ".join(f"{case} {len(runs)}" for case, runs in found.items())
    return reported(found, [f"Processes: {counts}.", *notes])


if __name__ == "__main__":
    harness.main(measure)
