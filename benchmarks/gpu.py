"""Speed on a GPU: python -m benchmarks.gpu.

The networks are the MLPs of the second and of the first tutorial, the CNN of the third, ResNet-50
on images of 224×224 with 1,000 classes, and a GPT of 8 blocks of width 512 on 512 tokens out of
8,192. The formats are float32, the same with TF32, mixed_float16 and mixed_bfloat16. ddl is
compared with Keras's `fit`, which compiles, with Orbit's StandardTrainer, both with Keras's Adam
and their data from arrays in host memory, and with the bare step: compiled, on one constant batch,
without metrics.

The contenders of a case share a process, and compute by turns; each case has several fresh
processes. The processes of several cases build and compile side by side, and then each measures
alone, so the time of the first window is that of a busy machine. Idle time and kernels are read
from TensorFlow's profiler, in an extra window. Memory is the peak during updates, without that of
the other contenders.

`--only=ResNet-50` measures the cases whose names contain the text, and `--only='MLP 64; GPT'` those
that contain one of several. No further process starts after nine minutes for each case; with
`--only` after nine minutes, which makes commands of less than ten.
"""

import dataclasses
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks import command
from benchmarks.gpu_cases import CASES, Case
from benchmarks.repeats import over_processes
from benchmarks.report import Bar, Cell, Plot, Report, Series, Spread, Table
from benchmarks.turns import Contender, Failed

DDL, FIT, ORBIT, BARE = NAMES = ("ddl", "Keras fit", "Orbit", "bare step")
PROCESSES = 3
SIDE_BY_SIDE = max(1, (os.cpu_count() or 1) // 2)
"""Cases that build side by side: XLA compiles one with about two cores."""

_SECONDS = 540

Found = dict[Case, list[Mapping[str, Any]]]
"""For each case what its processes found: `gpu_contenders.measured`."""


def measure(quick: bool, only: str = "") -> Iterator[Report]:
    """Measures every case in one process, then in a second, and so on; yields what is measured."""
    command.need_gpu("benchmarks.gpu")
    parts = only.split(";")
    cases = [case for case in CASES if any(part.strip() in str(case) for part in parts)]
    if not cases:
        raise SystemExit(f"No case contains {only!r}: {', '.join(map(str, CASES))}.")
    if quick:
        cases = [dataclasses.replace(case, steps=2, rounds=1) for case in cases]
    found: Found = {}
    failed: dict[Case, str] = {}
    begin = time.monotonic()
    took = 0.0
    for _ in range(1 if quick else PROCESSES):
        start = time.monotonic()
        if start - begin + took > _SECONDS * (1 if only else len(cases)):
            break
        for case, run in in_processes(cases):
            if isinstance(run, Failed):
                failed[case] = str(run)
                print(f"{case}: {run}", flush=True)
            else:
                found.setdefault(case, []).append(run)
                print(f"{case}: {_line(run)}", flush=True)
            yield reported(found, failed)
        took = time.monotonic() - start


def in_processes(cases: Sequence[Case]) -> Iterator[tuple[Case, Mapping[str, Any] | Failed]]:
    """Measures each case in a fresh process; see `gpu_contenders.Contenders`.

    So many processes as `SIDE_BY_SIDE` build and compile side by side. Each measures alone.
    """
    for first in range(0, len(cases), SIDE_BY_SIDE):
        some = cases[first : first + SIDE_BY_SIDE]
        contenders = [Contender("benchmarks.gpu_contenders:measure", [case], {}) for case in some]
        built: list[Failed | None] = []
        for contender in contenders:
            contender.start_window()
        for contender in contenders:
            try:
                contender.end_window()
            except Failed as failure:
                built.append(failure)
            else:
                built.append(None)
        for case, contender, failure in zip(some, contenders, built, strict=True):
            try:
                yield case, failure or contender.window()
            except Failed as error:
                yield case, error
            finally:
                contender.close()


def _line(found: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} {found[name]['ms']:.3g} ms" for name in NAMES if isinstance(found[name], dict)
    )


def figures(runs: Sequence[Mapping[str, Any]], name: str, kind: str) -> np.ndarray | None:
    """Returns a contender's figure in each process; None if one process has none."""
    values = [run[name].get(kind) if isinstance(run[name], dict) else None for run in runs]
    return None if None in values else np.array(values, float)


def spread(runs: Sequence[Mapping[str, Any]], name: str, kind: str) -> Cell:
    """Returns the figure's median and range; "–" if it is missing."""
    values = figures(runs, name, kind)
    return "–" if values is None else over_processes(values)


def ratio(runs: Sequence[Mapping[str, Any]], name: str) -> Spread | None:
    """Returns ddl's speed relative to a contender's, or its time relative to the bare step's."""
    ours, theirs = figures(runs, DDL, "ms"), figures(runs, name, "ms")
    if ours is None or theirs is None:
        return None
    return over_processes(ours / theirs if name == BARE else theirs / ours, is_ratio=True)


def rate(case: Case, runs: Sequence[Mapping[str, Any]]) -> Cell:
    """Returns ddl's examples or tokens a second."""
    times = figures(runs, DDL, "ms")
    return "–" if times is None else over_processes(case.batch * case.tokens / times * 1e3)


def reported(found: Found, failed: Mapping[Case, str] | None = None) -> Report:
    """Returns the report of what is measured, and of the cases whose processes failed."""
    rows: list[list[Cell]] = []
    each: list[list[Cell]] = []
    bars = []
    for case, runs in found.items():
        ratios = {name: ratio(runs, name) for name in (FIT, ORBIT, BARE)}
        rows.append([str(case), rate(case, runs), *(r or "–" for r in ratios.values())])
        each += [
            [f"{case}: {name}"]
            + [spread(runs, name, kind) for kind in ("ms", "idle", "kernels", "memory", "first")]
            for name in NAMES
        ]
        if (value := ratios[BARE]) is not None:
            bars.append(Bar(f"{case}: ddl's time / the bare step's", value, 1.05, "at most"))
        if (value := ratios[FIT]) is not None:
            bars.append(Bar(f"{case}: ddl's speed / {FIT}'s", value, 1.0))
    unit = "images or tokens/s"
    columns = ["", unit, f"speed / {FIT}", f"speed / {ORBIT}", f"time / {BARE}"]
    others = ["", "ms", "idle, ms", "kernels", "memory, MB", "first window, s"]
    devices = ", ".join(sorted({run["device"] for runs in found.values() for run in runs}))
    counts = ", ".join(f"{case} {len(runs)}" for case, runs in found.items())
    failures = [
        f"{name}, {case}: {run[name]}"
        for case, runs in found.items()
        for run in runs[:1]
        for name in NAMES
        if isinstance(run[name], str)
    ]
    failures += [f"A process of {case} failed: {why}." for case, why in (failed or {}).items()]
    return Report(
        [Table("ddl beside the others", columns, rows), Table("An update", others, each)],
        bars,
        [_plot(found)],
        [f"Measured on {devices}. Processes: {counts}.", *failures],
    )


def _plot(found: Found) -> Plot:
    series = []
    for name in (FIT, ORBIT):
        values = [(str(c), v) for c, runs in found.items() if (v := ratio(runs, name)) is not None]
        series.append(
            Series(name, [x.replace(", ", ",\n") for x, _ in values], [v for _, v in values])
        )
    return Plot("ddl's speed", "", "times as fast as", series, level=1.0)


if __name__ == "__main__":
    command.main(measure, has_cases=True)
