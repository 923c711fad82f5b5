"""What it brings to keep freed memory: python -m benchmarks.host_memory.

One process on one core trains as glibc comes, the other with ddl.host_memory.keep_freed_memory, in
turns: the networks of benchmarks.weak_scaling. Also the largest memory that each one ever held.
"""

import os
import resource

from benchmarks import report
from benchmarks.report import Plot, Report, Series, Table, spread
from benchmarks.turns import Contender, Turns
from benchmarks.weak_scaling import CASES, Case, ddl_window, strategy_of_process, take

AS_IT_COMES, KEEPING = "as glibc comes", "keeping freed memory"


def as_it_comes(case: Case | None, turns: Turns) -> None:
    """Trains on one core, or reports the memory."""
    _work(case, turns, keeps_memory=False)


def keeping(case: Case | None, turns: Turns) -> None:
    """The same with freed memory kept."""
    _work(case, turns, keeps_memory=True)


def _work(case: Case | None, turns: Turns, keeps_memory: bool) -> None:
    if case is None:
        while turns.wait():
            turns.report(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
        return
    strategy = strategy_of_process("one_device", keeps_memory)
    take(turns, case.steps, ddl_window(case, strategy))


def measure(quick: bool = False) -> Report:
    """Runs all cases, then asks for the memory."""
    cases = [case._replace(steps=2) for case in CASES[2:]] if quick else list(CASES)
    rounds = 1 if quick else 5
    environment = {"CORE": str(min(os.sched_getaffinity(0))), "CUDA_VISIBLE_DEVICES": ""}
    contenders = {
        name: Contender(f"benchmarks.host_memory:{entry}", [*cases, None], environment)
        for name, entry in ((AS_IT_COMES, "as_it_comes"), (KEEPING, "keeping"))
    }
    rows, ratios = [], []
    try:
        windows = {name: contender.window for name, contender in contenders.items()}
        for case in cases:
            report.interleaved(windows, 1)
            found = report.interleaved(windows, rounds)
            usual, kept = found[AS_IT_COMES][:, 0], found[KEEPING][:, 0]
            ratios.append(spread(kept / usual))
            rows.append([case.name, ratios[-1], spread(usual), spread(kept)])
            for contender in contenders.values():
                contender.next_case()
        peaks = {name: contender.window() for name, contender in contenders.items()}
    finally:
        for contender in contenders.values():
            contender.close()
    return Report(
        [
            Table("Time of an update", ["", "ratio", "ms as it comes", "ms keeping"], rows),
            Table(
                "Largest resident memory",
                ["", "MiB"],
                [[name, float(value)] for name, value in peaks.items()],
            ),
        ],
        plots=[
            Plot(
                "Time of an update, of that without",
                "",
                "ratio",
                [Series(KEEPING, [case.name for case in cases], ratios)],
                level=1.0,
            )
        ],
    )


if __name__ == "__main__":
    report.main(measure)
