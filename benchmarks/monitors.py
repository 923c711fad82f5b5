"""Cost of the monitors of a run: python -m benchmarks.monitors.

The MLP 784-128-10 trains in batches of 25 on one device, and writes a line to metrics.jsonl every
100 updates. Windows without monitors stand beside windows with those that are on by default: the
split of the time, the goodput and the memory of the process. They train the same trainer in the
same process, by turns. Further windows add monitors that are asked for: spans, and the loss by
class with a trainer of its own. Ratios are those of a round.

Windows of one program differ by more than the monitors cost. The target is therefore judged by the
processor time of the monitors' own code, counted in a window of its own around each of their calls:
at each begin and end of a phase, after each loop, and at each log, with what their figures add to
the writing of a line. Its share is that of the fastest window without monitors of the process.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import command, networks, repeats
from benchmarks.report import Bar, Cell, Report, Table
from benchmarks.turns import Contender, Turns

NAMES = (*("none", "default", "default and spans", "loss by class"),)
LIMIT = 0.01
LOG_EVERY = 100
UPDATES, ROUNDS, PROCESSES = 4000, 15, 5


# ------------------------------------------------------------ in a process that trains


def contenders(updates: int, turns: Turns) -> None:
    """Reports the milliseconds of an update with each of `NAMES`, and of the monitors' own code."""
    import keras

    import ddl
    from ddl import distribution
    from ddl.data.synthetic import synthetic_images
    from ddl.metrics import MeanByClass
    from ddl.optimizers import FusedAdam

    class ByClass(ddl.Classification):
        """Reports the loss by class too."""

        def per_example(self, features: Any, training: bool) -> ddl.PerExample:
            """See `ddl.tasks.Task`."""
            found = super().per_example(features, training)
            by_class = {"loss_by_class": MeanByClass(10)(features["label"], found.loss)}
            return ddl.PerExample(found.loss, {**found.metrics, **by_class})

    distribution.configure_devices(gpus=())
    images = synthetic_images("train", image_shape=(28, 28, 1), num_classes=10, num_examples=8192)

    def trainer(task: type[ddl.Classification], **arguments: Any) -> ddl.Trainer:
        keras.utils.set_random_seed(0)
        model = networks.mlp()
        return ddl.Trainer(task(model), FusedAdam(), images, global_batch_size=25, **arguments)

    plain = trainer(ddl.Classification)
    by_class = trainer(ByClass)
    counted = Counted()
    with tempfile.TemporaryDirectory(prefix="monitors") as folder, ExitStack() as stack:
        windows = [
            _window(plain, updates, Path(folder, "a"), stack, monitored=False),
            _window(plain, updates, Path(folder, "b"), stack),
            _window(plain, updates, Path(folder, "c"), stack, spans=True),
            _window(by_class, updates, Path(folder, "f"), stack),
            _window(plain, updates, Path(folder, "g"), stack, counted=counted),
        ]
        for one in windows:
            one()  # traces the loop, and finds the length of the loops
        first = 0
        while turns.wait():
            places = [(first + place) % len(windows) for place in range(len(windows))]
            found = {place: repeats.seconds(windows[place]) for place in places}
            first += 1
            timed = [found[place] for place in range(len(NAMES))]
            turns.report([seconds / updates * 1e3 for seconds in [*timed, counted.take()]])


class Counted:
    """The processor time of this thread in the code of the monitors."""

    def __init__(self) -> None:
        """Begins at 0."""
        self._seconds = 0.0

    @contextmanager
    def adding(self, sign: int = 1) -> Iterator[None]:
        """Adds the time of the `with` block, or subtracts it."""
        start = time.thread_time()
        yield
        self._seconds += sign * (time.thread_time() - start)

    def wrapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function whose time is added."""

        def call(*arguments: Any) -> Any:
            with self.adding():
                return function(*arguments)

        return call

    def take(self) -> float:
        """Returns the seconds since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


def _window(
    trainer: Any,
    updates: int,
    folder: Path,
    stack: ExitStack,
    *,
    monitored: bool = True,
    spans: bool = False,
    counted: Counted | None = None,
) -> Callable[[], object]:
    """Returns a function that trains and logs, with monitors as a run has them."""
    from ddl.diagnosis.phases import during, observed_by
    from ddl.diagnosis.spans import written_in
    from ddl.diagnosis.times import Times
    from ddl.run.timing.monitor import Monitor
    from ddl.run.writers import JsonLinesWriter
    from ddl.training.actions import EachLoop, Periodic

    folder.mkdir()
    writer = JsonLinesWriter(folder / "metrics.jsonl")
    stack.callback(writer.close)

    def train(actions: Callable[[int], list[Any]]) -> None:
        with during("the run", kind="between"):
            trainer.train(updates, actions(trainer.step + updates), progress=False)

    def without() -> None:
        def log(step: int) -> None:
            writer.write(step, 0.0, "train", trainer.read_metrics())

        train(lambda last: [Periodic(LOG_EVERY, log, last)])

    def with_monitors() -> None:
        with ExitStack() as block:
            times = Times("start_up")
            block.enter_context(observed_by(times))
            if spans:
                block.enter_context(written_in(folder, "worker 0", print))
            monitor = Monitor(trainer, times, folder / "goodput.json", time.time(), print)

            def log(step: int) -> None:
                figures = trainer.read_metrics() | monitor.figures(step)
                writer.write(step, 0.0, "train", figures)

            train(lambda last: [EachLoop(monitor.loop_ended), Periodic(LOG_EVERY, log, last)])

    def counting() -> None:
        assert counted is not None
        times = Times("start_up")
        with observed_by(counted.wrapped(times)):
            monitor = Monitor(trainer, times, folder / "goodput.json", time.time(), print)

            def log(step: int) -> None:
                figures = trainer.read_metrics()
                with counted.adding():
                    writer.write(step, 0.0, "train", figures | monitor.figures(step))
                with counted.adding(-1):  # the line that a run without monitors writes
                    bare.write(step, 0.0, "train", figures)

            ended = EachLoop(counted.wrapped(monitor.loop_ended))
            train(lambda last: [ended, Periodic(LOG_EVERY, log, last)])

    if counted is not None:
        bare = JsonLinesWriter(folder / "bare.jsonl")
        stack.callback(bare.close)
        return counting
    return with_monitors if monitored else without


# ------------------------------------------------------------ in the benchmark's process


def measure(quick: bool) -> Iterator[Report]:
    """Measures in one process after the other; yields what is measured so far."""
    updates, rounds, processes = (200, 2, 1) if quick else (UPDATES, ROUNDS, PROCESSES)
    found: list[np.ndarray] = []
    for _ in range(processes):
        found.append(_process(updates, rounds))
        every = np.array(found)
        ratios = [
            repeats.over_processes(
                np.median(every[..., place] / every[..., 0], axis=1), is_ratio=True
            )
            for place in range(1, len(NAMES))
        ]
        own = every[..., -1].mean(axis=1) / every[..., 0].min(axis=1)
        share = repeats.over_processes(own)
        times = np.median(every, axis=1)
        row: list[Cell] = ["MLP 25, one device"]
        milliseconds = [*row, *(repeats.over_processes(times[:, i]) for i in range(len(NAMES)))]
        tables = [
            Table("Time with monitors, over that without", ["", *NAMES[1:]], [[*row, *ratios]]),
            Table("Milliseconds per update", ["", *NAMES], [milliseconds]),
            Table(
                "Processor time of the default monitors' own code",
                ["", "milliseconds per update", "over the time of an update without monitors"],
                [[*row, repeats.over_processes(every[..., -1].mean(axis=1)), share]],
            ),
        ]
        bar = Bar(
            "processor time of the default monitors / time of an update", share, LIMIT, "at most"
        )
        yield Report(tables, [bar])


def _process(updates: int, rounds: int) -> np.ndarray:
    """Returns the milliseconds of each contender, [rounds, contenders]."""
    process = Contender("benchmarks.monitors:contenders", [updates], {"TF_CPP_MIN_LOG_LEVEL": "3"})
    try:
        return np.array([process.window() for _ in range(rounds)])
    finally:
        process.close()


if __name__ == "__main__":
    command.main(measure)
