"""Cost of ddl's loop compared with the alternatives: python -m benchmarks.loop_overhead.

The networks are those of two tutorials: the MLP 784-128-dropout 0.2-10, and the CNN 3×3×32, 3×3×64,
maxpool, dropout 0.25, dense 128, dropout 0.5, dense 10. They train with Adam and dropout on 57,600
images of 28×28 float32, and keep the loss and the accuracy. The alternatives to ddl are Keras's
`fit` as the tutorials call it; `fit` with many steps per execution, without XLA, on the faster of
two pipelines; the loop of TensorFlow's tutorial on custom training, with a tf.function for each
step; and Orbit's StandardTrainer, whose loop is a tf.while, with Keras 3's Adam and with ddl's. The
floor is the bare step in a tf.while on one constant batch, with TensorFlow's fused Adam and without
metrics. The floor that reads is the same step on rows that it gathers from the arrays in a random
order, as ddl does.

Each contender has several fresh processes for each case, each of which waits while another one
computes. A figure is the median of what the processes found, with the lowest and the highest; one
process of a program differs from another by up to 15%. Windows that consist of one tf.while or a
few (tuned fit, Orbit, ddl, the floor) are longer, so that the cost of a call weighs as little as in
a long training. Windows end before the data do, so that no epoch begins in a window. On one device
the peers use no strategy, which is their fastest option. On several devices they use the default
MirroredStrategy, and `fit` runs one step per execution, since Keras 3.15 fails with more there.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from benchmarks import command
from benchmarks.repeats import interleaved, over_processes, rotated
from benchmarks.report import Bar, Plot, Report, Series, Spread, Table
from benchmarks.turns import Contender, Failed

FIT = "Keras fit"
TUNED = "Keras fit, tuned"
TUTORIAL = "tutorial's loop"
ORBIT = "Orbit"
ORBIT_FUSED = "Orbit, ddl's Adam"
DDL = "ddl"
FLOOR = "floor"
READING_FLOOR = "floor that reads"
_FLOORS = (FLOOR, READING_FLOOR)
FUNCTIONS = {
    FIT: "fit",
    f"{TUNED} (slices)": "fit_tuned_slices",
    f"{TUNED} (gather)": "fit_tuned_gather",
    TUTORIAL: "tutorial_loop",
    ORBIT: "orbit",
    ORBIT_FUSED: "orbit_fused",
    DDL: "ddl_trainer",
    FLOOR: "floor",
    READING_FLOOR: "reading_floor",
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A network, its devices and the length of a window.

    Attributes:
      model: "MLP" or "CNN".
      batch: Global batch size.
      replicas: 1 for one device; more are mirrored on as many virtual CPUs.
      steps: Updates in a window.
      rounds: Windows of each process.
      targets: The least speed relative to a peer, or the largest time relative to the floor.
      longer: Factor on `steps` for windows that consist of one tf.while or a few.
    """

    model: str
    batch: int
    replicas: int
    steps: int
    rounds: int
    targets: tuple[tuple[str, float], ...]
    longer: int = 1

    @property
    def processes(self) -> int:
        """Fresh processes of each contender; more where there is a target."""
        return 5 if self.targets else 3

    def __str__(self) -> str:
        where = "one device" if self.replicas == 1 else f"mirrored on {self.replicas}"
        return f"{self.model} {self.batch}, {where}"


_MIRRORED = ((FIT, 3.0), (TUTORIAL, 1.5), (ORBIT, 1.5))
CASES = (
    Case("MLP", 25, 1, 200, 3, ((FIT, 4.0), (TUNED, 1.5), (ORBIT, 1.5), (FLOOR, 1.10)), longer=5),
    Case("MLP", 256, 1, 28, 3, (), longer=8),
    Case("MLP", 512, 1, 11, 3, ((FLOOR, 1.05),), longer=20),
    Case("CNN", 256, 1, 5, 3, ((FLOOR, 1.05),)),
    Case("MLP", 64, 2, 90, 3, _MIRRORED, longer=6),
    Case("MLP", 256, 2, 37, 3, (), longer=4),
    Case("CNN", 256, 2, 5, 3, ()),
    Case("MLP", 64, 4, 90, 3, _MIRRORED, longer=4),
    Case("MLP", 256, 4, 37, 3, (), longer=4),
    Case("CNN", 256, 4, 5, 3, ()),
)


@dataclasses.dataclass
class Found:
    """Milliseconds per step of each contender, one figure a process, and the failures."""

    times: dict[str, np.ndarray]
    failures: dict[str, str]


def measure(quick: bool) -> Iterator[Report]:
    """Measures one case after the other; yields what is measured so far."""
    found: dict[Case, Found] = {}
    for case in CASES:
        if quick:
            case = dataclasses.replace(case, rounds=2, steps=5, targets=())
        found[case] = run_case(case, 1 if quick else case.processes)
        yield reported(found)


def reported(found: dict[Case, Found]) -> Report:
    """Returns the report of the cases that were measured."""
    return Report(
        [ratios(found), milliseconds(found)],
        [bar for case, result in found.items() for bar in bars(case, result)],
        [plot(found)],
        [
            f"{name}, {case}: {text}"
            for case, result in found.items()
            for name, text in result.failures.items()
        ],
    )


def run_case(case: Case, processes: int) -> Found:
    """Runs a case with several fresh processes of each contender."""
    found = [run_once(case, number) for number in range(processes)]
    failures = {name: text for each in found for name, text in each.failures.items()}
    times = {
        name: np.array([np.median(each.times[name]) for each in found])
        for name in found[0].times
        if name not in failures
    }
    medians = ", ".join(f"{name} {np.median(values):.3g}" for name, values in times.items())
    print(f"{case}, ms per step: {medians}", flush=True)
    tuned = {name: values for name, values in times.items() if name.startswith(TUNED)}
    if tuned:
        best = min(tuned, key=lambda name: float(np.median(tuned[name])))
        times[TUNED] = times[best]
    return Found(times, failures)


def run_once(case: Case, number: int) -> Found:
    """Runs a case with one fresh process of each contender; another one begins each time."""
    contenders = {
        name: Contender(f"benchmarks.contenders:{function}", [case], {})
        for name, function in rotated(FUNCTIONS, number * case.rounds).items()
        if name not in _FLOORS or case.replicas == 1
    }
    try:
        return by_turns(case, contenders)
    finally:
        for contender in contenders.values():
            contender.close()


def by_turns(case: Case, contenders: dict[str, Contender]) -> Found:
    """Lets all contenders build and trace at once, then warm up and compute one at a time."""
    failures: dict[str, str] = {}
    for contender in contenders.values():
        contender.start_window()
    for name, contender in contenders.items():
        try:
            contender.end_window()
            contender.window()
        except Failed as failure:
            failures[name] = str(failure)
    going = {name: c.window for name, c in contenders.items() if name not in failures}
    times = interleaved(going, case.rounds)
    return Found({name: values / case.steps * 1e3 for name, values in times.items()}, failures)


def ratio(result: Found, name: str) -> Spread | None:
    """Returns ddl's speed relative to a peer's, or ddl's time relative to a floor's.

    Each process of ddl is compared with the process of the peer that ran beside it.
    """
    if name not in result.times or DDL not in result.times:
        return None
    ratios = result.times[name] / result.times[DDL]
    return over_processes(1 / ratios if name in _FLOORS else ratios, is_ratio=True)


def bars(case: Case, result: Found) -> list[Bar]:
    """Returns the targets of a case whose contenders have both run."""
    found = []
    for name, limit in case.targets:
        if (value := ratio(result, name)) is not None:
            what = "ddl's time / the floor's" if name == FLOOR else f"ddl's speed / {name}'s"
            kind = "at most" if name == FLOOR else "at least"
            found.append(Bar(f"{case}: {what}", value, limit, kind))
    return found


_PEERS = (FIT, TUNED, TUTORIAL, ORBIT, ORBIT_FUSED)


def ratios(found: dict[Case, Found]) -> Table:
    """Builds the table of ddl's speed relative to each peer's."""
    rows = [
        [str(case), *(ratio(result, name) or "–" for name in (*_PEERS, *_FLOORS))]
        for case, result in found.items()
    ]
    columns = ["", *(f"speed / {n}" for n in _PEERS), *(f"time / {n}" for n in _FLOORS)]
    return Table(
        "ddl's speed relative to the others; its time relative to the floors", columns, rows
    )


def milliseconds(found: dict[Case, Found]) -> Table:
    """Builds the table of each contender's milliseconds per step."""
    rows = [
        [name, *(over_processes(r.times[name]) if name in r.times else "–" for r in found.values())]
        for name in FUNCTIONS
    ]
    return Table("Milliseconds per step", ["", *map(str, found)], rows)


def plot(found: dict[Case, Found]) -> Plot:
    """Plots the ratios as bars."""
    series = []
    for name in _PEERS:
        values = [(str(c), v) for c, r in found.items() if (v := ratio(r, name)) is not None]
        series.append(
            Series(name, [x.replace(", ", ",\n") for x, _ in values], [v for _, v in values])
        )
    return Plot("ddl's speed", "", "times as fast as", series, level=1.0)


if __name__ == "__main__":
    command.main(measure)
