"""Updates of embedding tables of several sizes: python -m benchmarks.large_embeddings.

A table of vectors of 32 numbers is looked up 8 times an example, at random, and a perceptron with
32 units classifies them. The batch size is 256, and the optimizer Adagrad, in float32. An update
that is sparse from end to end takes as long for 1,000,000 rows as for 2,000. The alternatives to
ddl are Keras's `fit`, with one and with many steps per execution, and the bare step in a tf.while:
rows are read and updated alone, without metrics. ddl also runs with two microbatches, and on two
virtual CPUs.

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
from benchmarks import command
from benchmarks.repeats import interleaved, over_processes, rotated
from benchmarks.report import Bar, Report, Spread, Table, plot_of
from benchmarks.turns import Contender, Failed, Turns
from ddl import distribution
from ddl.optimizers import FusedAdagrad

WIDTH, LOOKUPS, BATCH, BATCHES = 32, 8, 256, 40
RATE, ACCUMULATOR = 0.05, 0.1
ROWS = (2_000, 100_000, 1_000_000)
LARGEST_GROWTH = 1.2  # from the fewest rows to the most

DDL = "ddl"
FUNCTIONS = {
    "Keras fit": "fit",
    "Keras fit, tuned": "fit_tuned",
    DDL: "ddl_alone",
    "ddl, 2 microbatches": "ddl_accumulates",
    "ddl, mirrored on 2": "ddl_mirrored",
    "bare loop": "bare_loop",
}
ON_ONE_DEVICE = (DDL, "ddl, 2 microbatches")


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
            FusedAdagrad(RATE),
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


def fit(case: Case, turns: Turns, steps_per_execution: int = 1) -> None:
    """Runs Keras's `fit`."""
    model = network(case)
    model.compile(
        keras.optimizers.Adagrad(RATE),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        steps_per_execution=steps_per_execution,
        jit_compile=False,
    )
    ids, labels = data(case)
    batches = tf.data.Dataset.from_tensor_slices((ids, labels)).batch(BATCH).repeat().prefetch(2)

    def window() -> None:
        model.fit(batches, steps_per_epoch=case.steps, verbose=0)

    window()
    turns.take(window, case.steps)


def fit_tuned(case: Case, turns: Turns) -> None:
    """Runs `fit` with all steps of a window in one execution."""
    fit(case, turns, case.steps)


def bare_loop(case: Case, turns: Turns) -> None:
    """Runs the bare step in a tf.while, with TensorFlow's kernels of Adagrad."""
    model = network(case)
    table, *others = [variable.value for variable in model.trainable_variables]
    slots = [tf.Variable(tf.fill(v.shape, ACCUMULATOR)) for v in (table, *others)]
    body = keras.Sequential(model.layers[1:])
    ids, labels = map(tf.constant, data(case))

    def step(count: tf.Tensor) -> tuple[tf.Tensor]:
        first = count % BATCHES * BATCH
        with tf.GradientTape() as tape:
            vectors = table.sparse_read(ids[first : first + BATCH])
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
                labels[first : first + BATCH], body(vectors, training=True)
            )
            loss = tf.reduce_mean(losses)
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
        return (count + 1,)

    @tf.function(autograph=False)
    def loop() -> tf.Tensor:
        start = (tf.constant(0, tf.int64),)
        return tf.while_loop(lambda count: count < case.steps, step, start)[0]

    loop()
    turns.take(lambda: loop().numpy(), case.steps)


def run_case(case: Case, processes: int, rounds: int) -> dict[str, np.ndarray]:
    """Returns the milliseconds per update of each contender, one figure a process."""
    times: dict[str, list[float]] = {name: [] for name in FUNCTIONS}
    for number in range(processes):
        contenders = {
            name: Contender(f"benchmarks.large_embeddings:{function}", [case], {})
            for name, function in rotated(FUNCTIONS, number).items()
        }
        try:
            for name, contender in contenders.items():
                try:
                    contender.window()  # builds, traces and warms up
                except Failed as failure:
                    raise RuntimeError(f"{name} at {case.rows:,} rows: {failure}") from failure
            windows = {name: contender.window for name, contender in contenders.items()}
            for name, values in interleaved(windows, rounds).items():
                times[name].append(float(np.median(values)) * 1e3)
        finally:
            for contender in contenders.values():
                contender.close()
    return {name: np.array(values) for name, values in times.items()}


def reported(found: dict[int, dict[str, np.ndarray]], checks: bool) -> Report:
    """Returns the report of the numbers of rows that were measured."""
    columns = ["", *(f"{rows:,} rows" for rows in found)]
    rows = [
        [name, *(over_processes(times[name]) for times in found.values())] for name in FUNCTIONS
    ]
    table = Table("Milliseconds per update", columns, rows)
    bars = []
    if len(found) == len(ROWS) and checks:
        few, many = found[ROWS[0]], found[ROWS[-1]]
        for name in ON_ONE_DEVICE:
            growth: Spread = over_processes(many[name] / few[name], is_ratio=True)
            text = f"{name}: time for {ROWS[-1]:,} rows / for {ROWS[0]:,}"
            bars.append(Bar(text, growth, LARGEST_GROWTH, "at most"))
    return Report([table], bars, [plot_of(table, columns[1:], "ms per update", log_y=True)])


def measure(quick: bool) -> Iterator[Report]:
    """Measures one number of rows after the other; yields what is measured so far."""
    found = {}
    for rows in ROWS:
        case = Case(rows, 10 if quick else 200)
        found[rows] = run_case(case, 1 if quick else 5, 1 if quick else 5)
        medians = ", ".join(f"{name} {np.median(v):.3g}" for name, v in found[rows].items())
        print(f"{rows:,} rows, ms per update: {medians}", flush=True)
        yield reported(found, checks=not quick)


if __name__ == "__main__":
    command.main(measure)
