"""Cost of `train`'s progress bar and history: python -m benchmarks.progress_bar.

One trainer of the MLP 784-128-10 in batches of 25 on one device, whose update is the smallest of
`benchmarks.loop_overhead`, trains by turns with the bar in a terminal of its own and without. A
call to `train` takes several seconds, so that the bar is shown. Both keep the history, which has no
switch. Several fresh processes do this; a figure is the median of what they found, with the lowest
and the highest.
"""

import os
import pty
import subprocess
import sys

import numpy as np

from benchmarks import command, repeats
from benchmarks.report import Bar, Cell, Report, Table
from benchmarks.turns import Contender, Turns

LIMIT = 1.02
UPDATES, ROUNDS, PROCESSES = 15_000, 3, 5
NAMES = ("without the bar", "with the bar")


def contender(updates: int, turns: Turns) -> None:
    """Reports the seconds of a `train` without the bar and of one with it, as [2]."""
    from benchmarks import contenders
    from benchmarks.loop_overhead import Case

    _open_terminal()
    trainer = contenders.build_trainer(Case("MLP", 25, 1, 200, 1, ()))
    trainer.train(2 * max(updates // 4, 1), progress=False)  # finds the number of steps per loop
    first = 0
    while turns.wait():
        order = (bool(first), not first)
        found = {
            bar: repeats.seconds(lambda bar=bar: trainer.train(updates, progress=bar))
            for bar in order
        }
        first = 1 - first
        turns.report([found[False], found[True]])


def _open_terminal() -> None:
    """Makes standard output a terminal, which another process reads."""
    ours, theirs = pty.openpty()
    subprocess.Popen(["cat"], stdin=ours, stdout=subprocess.DEVNULL)
    os.close(ours)
    os.dup2(theirs, 1)
    sys.stdout = os.fdopen(1, "w", closefd=False)


def measure(quick: bool) -> Report:
    """Measures the time with the bar over that without."""
    updates, rounds, processes = (40, 2, 1) if quick else (UPDATES, ROUNDS, PROCESSES)
    found = np.array([_process(updates, rounds) for _ in range(processes)])
    ratio = repeats.over_processes(np.median(found[..., 1] / found[..., 0], axis=1), is_ratio=True)
    times = np.median(found, axis=1) / updates * 1e3
    row: list[Cell] = ["MLP 25, one device"]
    row += [repeats.over_processes(times[:, i]) for i in range(2)]
    table = Table("Milliseconds per step", ["", *NAMES, "with / without"], [[*row, ratio]])
    return Report([table], [Bar("time with the bar / without", ratio, LIMIT, "at most")])


def _process(updates: int, rounds: int) -> list[list[float]]:
    process = Contender("benchmarks.progress_bar:contender", [updates], {})
    try:
        process.window()
        return [process.window() for _ in range(rounds)]
    finally:
        process.close()


if __name__ == "__main__":
    command.main(measure)
