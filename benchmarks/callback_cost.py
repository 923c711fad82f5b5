"""Cost of callbacks that do nothing: python -m benchmarks.callback_cost.

The MLP 784-128-10 trains in batches of 25 a worker, on one device and on two workers, which
are pinned to a core each. Windows of updates without a callback stand beside windows with one
that is called every 1,000, 100 and 10 updates; all in the same process, of the same trainer, by
turns. Ratios are those of a round. `Every` ends a loop on the devices at each call. On several
workers, ddl also compares what a callback changed: it reads all weights before and after the call.
"""

import os
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import numpy as np

from benchmarks import command, networks, repeats
from benchmarks.pinned_workers import PinnedWorkers, pin, strategy_of_process
from benchmarks.report import Bar, Report, Table
from benchmarks.turns import Contender, Turns

NONE = "none"
PERIODS = (1000, 100, 10)
LIMIT = 1.01


class Case(NamedTuple):
    """Where it trains, who calls the callback, and the updates of a window."""

    workers: int
    on: Literal["all", "chief"]
    steps: int

    def __str__(self) -> str:
        return "one device" if self.workers == 1 else f"two workers, on={self.on!r}"


CASES = (Case(1, "all", 2000), Case(2, "all", 2000), Case(2, "chief", 2000))


# ------------------------------------------------------------ in a process that trains


def contenders(case: Case, turns: Turns) -> None:
    """Reports the milliseconds of an update without a callback, and with each period."""
    pin()
    strategy = strategy_of_process()
    import keras

    import ddl
    from ddl.callbacks import Every
    from ddl.callbacks.calling import Calls
    from ddl.data.synthetic import synthetic_images
    from ddl.optimizers import FusedAdam

    images = synthetic_images("train", image_shape=(28, 28, 1), num_classes=10, num_examples=8192)
    keras.utils.set_random_seed(0)
    batch = 25 * strategy.num_replicas_in_sync
    with strategy.scope():
        trainer = ddl.Trainer(
            ddl.Classification(networks.mlp()), FusedAdam(), images, global_batch_size=batch
        )

    def window(period: int | None) -> Callable[[], object]:
        every = [] if period is None else [Every(period, _nothing, on=case.on)]
        calls = Calls(every, trainer, None, lambda *_: None, dict)
        return lambda: trainer.train(case.steps, calls.actions, progress=False)

    windows = [window(period) for period in (None, *PERIODS)]
    for one in windows:
        one()  # traces the loop and the checksums, and finds the length of the loops
    first = 0
    while turns.wait():
        # All workers in the same order, of which each turn begins at another place.
        places = [(first + place) % len(windows) for place in range(len(windows))]
        found = {place: repeats.seconds(windows[place]) for place in places}
        first += 1
        turns.report([found[place] / case.steps * 1e3 for place in range(len(windows))])


def _nothing(moment: Any) -> None:
    """Does nothing."""


# ------------------------------------------------------------ in the benchmark's process


def measure(quick: bool) -> Iterator[Report]:
    """Measures one case after the other; yields what is measured so far."""
    names = [NONE, *(f"every {period:,}" for period in PERIODS)]
    rows: list[list[Any]] = []
    times: list[list[Any]] = []
    bars: list[Bar] = []
    for case in CASES:
        case = case._replace(steps=20) if quick else case
        found = _measured(case, 1 if quick else 15)
        ratios = [repeats.ratio(found[:, i] / found[:, 0]) for i in range(1, len(names))]
        rows.append([str(case), *ratios])
        times.append([str(case), *(repeats.spread(found[:, i]) for i in range(len(names)))])
        what = f"{case}: time with a call every 1,000 / without"
        bars.append(Bar(what, ratios[0], LIMIT, "at most"))
        titles = "Time with a callback, over that without", "Milliseconds per update"
        yield Report(
            [Table(titles[0], ["", *names[1:]], rows), Table(titles[1], ["", *names], times)], bars
        )


def _measured(case: Case, rounds: int) -> np.ndarray:
    """Returns the milliseconds of each contender, [rounds, contenders]; of the slower worker."""
    entry = "benchmarks.callback_cost:contenders"
    if case.workers == 1:
        core = str(min(os.sched_getaffinity(0)))
        environment = {"CORE": core, "TF_CONFIG": "", "TF_CPP_MIN_LOG_LEVEL": "3"}
        alone = Contender(entry, [case], environment)
        try:
            return np.array([alone.window() for _ in range(rounds)])
        finally:
            alone.close()
    workers = PinnedWorkers(entry, [case], alone=False)
    try:
        return np.array([np.max(workers.windows(), axis=0) for _ in range(rounds)])
    finally:
        workers.close()


if __name__ == "__main__":
    command.main(measure)
