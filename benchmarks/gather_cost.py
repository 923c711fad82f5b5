"""Cost of `ddl.gather` on two workers: python -m benchmarks.gather_cost.

Two processes, pinned to a core each, gather rows in a tf.while, forward, and forward and backward.
Beside it stands the bare all-gather: one collective of as many bytes, for the rows and, backward,
for their gradients. The mask of the padding is part of the gather. Both contenders run in the same
processes, by turns. A figure is the slower worker's; ratios are those of a round.

The bytes are those that a worker hands to the collectives that send its rows, over those of the
rows; a scatter keeps one of the two parts that it is given.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from benchmarks import command, repeats
from benchmarks.pinned_workers import WORKERS, PinnedWorkers, strategy_of_process
from benchmarks.report import Bar, Report, Table
from benchmarks.turns import Turns

LIMIT = 1.1


class Case(NamedTuple):
    """What a loss gathers.

    Attributes:
      name: Name of the loss.
      rows: Rows of a worker.
      widths: Number of floats of a row, of each tensor.
      has_labels: Whether it gathers an int64 for each row too.
      turns: Gathers in a window.
    """

    name: str
    rows: int
    widths: tuple[int, ...]
    has_labels: bool
    turns: int

    @property
    def floats(self) -> int:
        """Bytes of a row that have gradients."""
        return 4 * sum(self.widths)

    @property
    def bytes(self) -> int:
        """Bytes of a row."""
        return self.floats + 8 * self.has_labels

    def __str__(self) -> str:
        return f"{self.name}: {self.rows:,} rows of {self.bytes:,} bytes"


CASES = (
    Case("triplets", 32, (16,), True, 1000),
    Case("SimCLR", 64, (32, 32), False, 1000),
    Case("SimCLR, large", 2048, (128, 128), False, 100),
    Case("CLIP, large", 8192, (512, 512), False, 10),
)
GATHER, BARE = "gather", "all-gather"
FORWARD, BOTH = "forward", "forward and backward"
CONTENDERS = [(who, what) for who in (GATHER, BARE) for what in (FORWARD, BOTH)]


# ------------------------------------------------------------ in a worker's process


def contenders(case: Case, turns: Turns) -> None:
    """Reports the milliseconds of each contender, and the sent bytes over those of the rows."""
    import tensorflow as tf

    from ddl.layers import replica_gather

    sent: dict[str, int] = dict.fromkeys((GATHER, "scatter"), 0)
    collective_ops = replica_gather.collective_ops
    gathers, scatters = collective_ops.all_gather_v2, collective_ops.all_to_all_v2

    def counted(name: str, collective: Callable[..., Any], share: int) -> Callable[..., Any]:
        def call(values: tf.Tensor, *args: Any, **kwargs: Any) -> Any:
            sent[name] += values.shape.num_elements() * values.dtype.size // share
            return collective(values, *args, **kwargs)

        return call

    collective_ops.all_gather_v2 = counted(GATHER, gathers, 1)
    collective_ops.all_to_all_v2 = counted("scatter", scatters, WORKERS)
    windows, ratios = {}, []
    for who, what in CONTENDERS:
        sent.update(dict.fromkeys(sent, 0))
        windows[f"{who}, {what}"] = window = _window(case, who, what == BOTH)
        window()  # traces
        if (who, what) == (GATHER, BOTH):
            ratios = [sent[GATHER] / (case.rows * case.bytes)]
            ratios.append(sent["scatter"] / (case.rows * case.floats))
    collective_ops.all_gather_v2, collective_ops.all_to_all_v2 = gathers, scatters
    names, first = list(windows), 0
    while turns.wait():
        # All workers in the same order, of which each turn begins at another place.
        order, first = names[first:] + names[:first], (first + 1) % len(names)
        found = {name: repeats.seconds(windows[name]) / case.turns * 1e3 for name in order}
        turns.report(([found[name] for name in names], ratios))


def _window(case: Case, who: str, backward: bool) -> Callable[[], object]:
    """Returns a function that gathers in a loop. Each turn takes what the one before returned."""
    import tensorflow as tf

    strategy = strategy_of_process()
    turn = (_gathered if who == GATHER else _bare)(case, backward)

    @tf.function(autograph=False)
    def loop(values: list[tf.Tensor]) -> tf.Tensor:
        def body(number: tf.Tensor, values: list[tf.Tensor]) -> Any:
            found = strategy.run(turn, args=(values,))
            return number + 1, [strategy.experimental_local_results(x)[0] for x in found]

        start = (tf.constant(0), values)
        return tf.while_loop(lambda number, _: number < case.turns, body, start)[1]

    widths = case.widths if who == GATHER else (-(-case.bytes // 4),)
    values = [tf.random.stateless_normal([case.rows, width], (1, 2)) for width in widths]
    return lambda: [x.numpy() for x in loop(values)]


def _gathered(case: Case, backward: bool) -> Callable[[Any], Any]:
    """Returns a turn of a loss that gathers. Replica context."""
    import tensorflow as tf

    import ddl
    from ddl.microbatch import Microbatch
    from ddl.random import batch_counter

    def turn(values: list[tf.Tensor]) -> list[tf.Tensor]:
        number = tf.distribute.get_replica_context().replica_id_in_sync_group
        current = Microbatch(
            seed=0,
            training=True,
            counter=batch_counter(tf.zeros([], tf.int64)),
            first_row=case.rows * tf.cast(number, tf.int64),
            rows=case.rows,
            mask=tf.ones([case.rows], tf.bool),
        )
        labels = [tf.zeros([case.rows], tf.int64)] if case.has_labels else []
        with tf.GradientTape() as tape, current.forward():
            tape.watch(values)
            others = ddl.gather([*values, *labels])
            floats = others.rows[: len(values)]
            loss = tf.add_n([tf.reduce_sum(x) for x in floats])
        with tf.control_dependencies([others.mask, *others.rows]):
            if not backward:
                return [tf.identity(x[: case.rows]) for x in floats]
            gradients = tape.gradient(loss, values)
            return [x - 1e-9 * g for x, g in zip(values, gradients, strict=True)]

    return turn


def _bare(case: Case, backward: bool) -> Callable[[Any], Any]:
    """Returns a turn of one collective of all bytes, and one for the gradients. Replica context."""
    import tensorflow as tf
    from tensorflow.python.distribute import distribute_utils

    def exchange(strategy: Any, each: Any) -> Any:
        (launcher,) = strategy.extended._cross_device_ops._launchers
        (own,) = strategy.experimental_local_results(each)
        return distribute_utils.regroup([launcher._all_gather(own, None)])

    def all_gather(values: tf.Tensor) -> tf.Tensor:
        rows = tf.distribute.get_replica_context().merge_call(exchange, args=(values,))
        return tf.ensure_shape(rows, [WORKERS * values.shape[0], values.shape[1]])

    def turn(values: list[tf.Tensor]) -> list[tf.Tensor]:
        (own,) = values
        there = all_gather(own)[: case.rows]
        if not backward:
            return [there]
        back = all_gather(there[:, : case.floats // 4])[: case.rows]
        return [tf.concat([back, there[:, case.floats // 4 :]], axis=1)]

    return turn


# ------------------------------------------------------------ in the benchmark's process


def measure(quick: bool) -> Iterator[Report]:
    """Measures one case after the other; yields what is measured so far."""
    cases = [case._replace(turns=3) for case in CASES[:2]] if quick else list(CASES)
    rows: list[list[Any]] = []
    bars: list[Bar] = []
    workers = PinnedWorkers("benchmarks.gather_cost:contenders", cases, alone=False)
    try:
        for case in cases:
            workers.windows()  # the first may still allocate memory
            found = [workers.windows() for _ in range(1 if quick else 9)]
            times = np.array([np.max([ms for ms, _ in each], axis=0) for each in found])
            names = [f"{who}, {what}" for who, what in CONTENDERS]
            of = dict(zip(names, times.T, strict=True))
            ratios = {
                what: repeats.ratio(of[f"{GATHER}, {what}"] / of[f"{BARE}, {what}"])
                for what in (FORWARD, BOTH)
            }
            sent = found[0][0][1]
            rows.append([str(case), *sent, *ratios.values(), *map(repeats.spread, of.values())])
            bars.append(Bar(f"{case}: sent bytes / those of the rows", sent[0], LIMIT, "at most"))
            bars += [
                Bar(f"{case}: time / the all-gather's, {what}", value, LIMIT, "at most")
                for what, value in ratios.items()
            ]
            yield _report(rows, bars, names)
            workers.next_case()
    finally:
        workers.close()


def _report(rows: list[list[Any]], bars: list[Bar], names: list[str]) -> Report:
    title = "Bytes and time of a gather, over those of one all-gather"
    columns = ["", "bytes forward", "bytes backward", FORWARD, BOTH]
    milliseconds = Table("Milliseconds", ["", *names], [[r[0], *r[5:]] for r in rows])
    return Report([Table(title, columns, [r[:5] for r in rows]), milliseconds], bars)


if __name__ == "__main__":
    command.main(measure)
