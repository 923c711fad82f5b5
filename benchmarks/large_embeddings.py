"""Updates of embedding tables of several sizes: python -m benchmarks.large_embeddings.

A table of vectors of 32 numbers is looked up 8 times an example, at random, and a perceptron with
32 units classifies them. The batch size is 256, and the optimizer Adagrad, in float32. An update
that is sparse from end to end takes as long for 1,000,000 rows as for 2,000. The alternatives to
ddl are Keras's `fit`, with one and with many steps per execution; Orbit's StandardTrainer; and the
bare step in a tf.while: rows are read and updated alone, without metrics. The alternatives read
batches in the order of the arrays, while ddl shuffles. ddl also runs with two microbatches, and on
two virtual CPUs.

ddl and the bare loop look up rows, merge those of one index and update them, which takes most of
the time. ddl alone computes the order of the examples and the metrics. Keras adds Adagrad's epsilon
within the root and TensorFlow's sparse kernel adds it outside, so ddl reads and writes the rows of
the accumulator and of the table with four kernels, and some elementwise ones, in place of one.

The growth with the rows has two causes, and the bare loop has them too. A batch looks up 2,048
rows, of which about 1,280 differ in a table of 2,000 and nearly all in one of 1,000,000: 1.6 times
as many rows to update. And the table and its accumulator take 128 MB each, so that most rows are
neither in the processor's caches nor in its table of pages. No kernel works on all rows, and no
memory is paged in after the first windows. The growth is measured on its own: processes of both
numbers of rows take turns. Sums of microbatches are dense with 2,000 rows, since a batch looks up
2,048; with more rows they stay sparse. The growth with two microbatches is between these two ways.

Each contender has fresh processes for each number of rows, each of which waits while another one
computes. A figure is the median of what the processes found, with the lowest and the highest.
"""

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

import ddl
from benchmarks import beside_rivals, command, rivals
from benchmarks.beside_rivals import BARE, DDL, Found
from benchmarks.report import Bar, Cell, Report, Spread, Table, plot_of
from benchmarks.turns import Turns
from ddl import distribution

WIDTH, LOOKUPS, BATCH, BATCHES = 32, 8, 256, 40
RATE, ACCUMULATOR = 0.05, 0.1
ROWS = (2_000, 100_000, 1_000_000)
LARGEST_GROWTH = 1.2  # from the fewest rows to the most

_MODULE = "benchmarks.large_embeddings"
FIT, TUNED, ORBIT = "Keras fit", "Keras fit, tuned", "Orbit"
FUNCTIONS = {
    FIT: "fit",
    TUNED: "fit_tuned",
    ORBIT: "orbit",
    DDL: "ddl_alone",
    "ddl, 2 microbatches": "ddl_accumulates",
    "ddl, mirrored on 2": "ddl_mirrored",
    BARE: "bare_loop",
}
RIVALS = {name: [name] for name in (FIT, TUNED, ORBIT)}
GROWING = (DDL, "ddl, 2 microbatches", "ddl, mirrored on 2")
"""The contenders whose time must not grow with the rows: the update, its microbatches and its
all-reduce."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A number of rows, and the length of a window in updates."""

    rows: int
    steps: int


def data(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Returns ids, int64 [n, 8], and labels, int64 [n]."""
    generator = np.random.default_rng(0)
    ids = generator.integers(0, case.rows, (BATCHES * BATCH, LOOKUPS))
    return ids, generator.integers(0, 2, len(ids))


def network(case: Case) -> keras.Model:
    """Builds the network, up to the logits."""
    layers = [
        keras.layers.Embedding(case.rows, WIDTH),
        keras.layers.Flatten(),
        keras.layers.Dense(32, activation="relu"),
        keras.layers.Dense(2),
    ]
    return keras.Sequential([keras.Input((LOOKUPS,), dtype="int64"), *layers])


def _ddl(case: Case, turns: Turns, replicas: int = 1, **arguments: Any) -> None:
    distribution.configure_devices(replicas if replicas > 1 else None, gpus=())
    strategy = distribution.build_strategy("mirrored" if replicas > 1 else "one_device")
    with strategy.scope():
        trainer = ddl.Trainer(
            ddl.Classification(network(case)),
            keras.optimizers.Adagrad(RATE),
            data(case),
            global_batch_size=BATCH,
            **arguments,
        )
    trainer.train(case.steps)
    turns.take(lambda: trainer.train(case.steps), case.steps)


def ddl_alone(case: Case, turns: Turns) -> None:
    """Runs ddl on one device."""
    _ddl(case, turns)


def ddl_accumulates(case: Case, turns: Turns) -> None:
    """Runs ddl on one device with two microbatches."""
    _ddl(case, turns, accumulation_steps=2)


def ddl_mirrored(case: Case, turns: Turns) -> None:
    """Runs ddl on two virtual CPUs."""
    _ddl(case, turns, 2)


def fit(case: Case, turns: Turns) -> None:
    """Runs Keras's `fit`."""
    rivals.fit(network(case), _adagrad(), rivals.batches(data(case), BATCH), case.steps, turns)


def fit_tuned(case: Case, turns: Turns) -> None:
    """Runs `fit` with all steps of a window in one execution."""
    rivals.fit(
        *(network(case), _adagrad(), rivals.batches(data(case), BATCH), case.steps, turns),
        steps_per_execution=case.steps,
        jit_compile=False,
    )


def orbit(case: Case, turns: Turns) -> None:
    """Runs Orbit."""
    rivals.orbit(network(case), _adagrad(), rivals.batches(data(case), BATCH), case.steps, turns)


def _adagrad() -> keras.optimizers.Optimizer:
    return keras.optimizers.Adagrad(RATE)


def bare_loop(case: Case, turns: Turns) -> None:
    """Runs the bare step in a tf.while, with TensorFlow's kernels of Adagrad."""
    model = network(case)
    table, *others = [variable.value for variable in model.trainable_variables]
    slots = [tf.Variable(tf.fill(v.shape, ACCUMULATOR)) for v in (table, *others)]
    body = keras.Sequential(model.layers[1:])

    def update(number: tf.Tensor, ids: tf.Tensor, labels: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(rivals.losses(body, table.sparse_read(ids), labels)[0])
        rows, *dense = tape.gradient(loss, [table, *others])
        indices, places = tf.unique(rows.indices)
        values = tf.math.unsorted_segment_sum(rows.values, places, tf.size(indices))
        tf.raw_ops.ResourceSparseApplyAdagradV2(
            var=table.handle,
            accum=slots[0].handle,
            lr=RATE,
            epsilon=1e-7,
            grad=values,
            indices=indices,
        )
        for variable, slot, gradient in zip(others, slots[1:], dense, strict=True):
            tf.raw_ops.ResourceApplyAdagradV2(
                var=variable.handle, accum=slot.handle, lr=RATE, epsilon=1e-7, grad=gradient
            )

    rivals.bare_loop(update, data(case), BATCH, case.steps, turns)


def reported(found: dict[int, Found], growth: Found | None, checks: bool) -> Report:
    """Returns the report of what was measured.

    Args:
      found: The contenders, by the number of rows.
      growth: What `functions_of_growth` found, or None.
      checks: Whether to compare with the targets.
    """
    named = {f"{rows:,} rows": each for rows, each in found.items()}
    tables = [beside_rivals.milliseconds("Milliseconds per update", named, [*FUNCTIONS])]
    plot = plot_of(tables[0], [*named], "ms per update", log_y=True)
    bars: list[Bar] = []
    if checks:
        for name, each in named.items():
            bars += beside_rivals.bars(name, each, RIVALS)
    failures = dict(named)
    if growth is not None:
        tables.append(_table_of_growths(growth))
        bars += _growths(growth) if checks else []
        failures["growth"] = growth
    return Report(tables, bars, [plot], beside_rivals.notes(failures))


def functions_of_growth(steps: int) -> dict[str, tuple[str, Case]]:
    """Returns function and case of each contender whose growth counts, few and many rows in turn.

    Args:
      steps: Updates of a window.
    """
    return {
        f"{name}, {rows:,} rows": (f"{_MODULE}:{FUNCTIONS[name]}", Case(rows, steps))
        for name in (*GROWING, BARE)
        for rows in (ROWS[0], ROWS[-1])
    }


def _growth_of(found: Found, name: str) -> Spread | None:
    return found.ratio(f"{name}, {ROWS[-1]:,} rows", f"{name}, {ROWS[0]:,} rows")


def _table_of_growths(found: Found) -> Table:
    """Returns the growth of each contender, and of ddl relative to the bare loop's."""
    rows: list[list[Cell]] = []
    for name in (*GROWING, BARE):
        growth = _growth_of(found, name)
        text = "a bare loop grows by" if name == BARE else name
        rows.append([text, "–" if growth is None else growth])
    return Table(f"Time for {ROWS[-1]:,} rows / for {ROWS[0]:,}, interleaved", ["", "times"], rows)


def _growths(found: Found) -> list[Bar]:
    """Returns the targets for the time of the most rows relative to the fewest."""
    bars = []
    for name in GROWING:
        growth = _growth_of(found, name)
        if growth is not None:  # else a note names the failure
            text = f"{name}: time for {ROWS[-1]:,} rows / for {ROWS[0]:,}"
            bars.append(Bar(text, growth, LARGEST_GROWTH, "at most"))
    return bars


def measure(quick: bool) -> Iterator[Report]:
    """Measures one number of rows after the other, then the growth; yields what is there so far."""
    functions = {name: f"{_MODULE}:{each}" for name, each in FUNCTIONS.items()}
    steps, repeats = (10, (1, 1)) if quick else (200, (5, 5))
    found: dict[int, Found] = {}
    for rows in ROWS:
        found[rows] = beside_rivals.run(functions, Case(rows, steps), *repeats)
        medians = ", ".join(f"{name} {np.median(v):.3g}" for name, v in found[rows].times.items())
        print(f"{rows:,} rows, ms per update: {medians}", flush=True)
        yield reported(found, None, checks=not quick)
    growth = beside_rivals.run_each(functions_of_growth(steps), *repeats)
    yield reported(found, growth, checks=not quick)


if __name__ == "__main__":
    command.main(measure)
