"""Updates of embedding tables of several sizes: python -m benchmarks.embeddings.

A table of vectors of 32 numbers is looked up 8 times an example, at random, and a perceptron with
32 units classifies them. The batch size is 256, and the optimizer Adagrad, in float32. An update
that is sparse from end to end takes as long for 1,000,000 rows as for 2,000. The alternatives to
ddl are Keras's `fit`, with one and with many steps per execution; Orbit's StandardTrainer; and the
bare step in a tf.while: rows are read and updated alone, without metrics. ddl also runs with two
microbatches, and on two virtual CPUs.

The growth with the rows has two causes, and the bare loop has them too. A batch looks up 2,048
rows, of which about 1,280 differ in a table of 2,000 and nearly all in one of 1,000,000: 1.6 times
as many rows to update. And the table and its accumulator take 128 MB each, so that most rows are
neither in the processor's caches nor in its table of pages. Sums of microbatches are dense with
2,000 rows, since a batch looks up 2,048; with more rows they stay sparse.
"""

import dataclasses

import keras
import tensorflow as tf

from benchmarks import contenders, harness
from benchmarks.cases import Case
from benchmarks.harness import Contender, Options, Report, Table, Target, Window, spread

ROWS = (2_000, 1_000_000)
RATE, ACCUMULATOR, EPSILON = 0.05, 0.1, 1e-7
GROWTH = 1.2
DDL, MICROBATCHES, MIRRORED, BARE = "ddl", "ddl, 2 microbatches", "ddl, mirrored on 2", "bare loop"
FIT, TUNED, ORBIT = OTHERS = ("Keras fit", "Keras fit, tuned", "Orbit")
FUNCTIONS = {
    FIT: "contenders:by_fit",
    TUNED: "contenders:by_tuned_fit",
    ORBIT: "contenders:by_orbit",
    DDL: "contenders:by_ddl",
    MICROBATCHES: "contenders:by_ddl_accumulating",
    MIRRORED: "contenders:by_ddl",
    BARE: "embeddings:bare",
}


def bare(case: Case) -> Window:
    """Trains by the bare step, with TensorFlow's kernels of Adagrad."""
    contenders.begin(case)
    model = contenders.network(case)
    table, *others = [variable.value for variable in model.trainable_variables]
    slots = [tf.Variable(tf.fill(v.shape, ACCUMULATOR)) for v in (table, *others)]
    body = keras.Sequential(model.layers[1:])

    def step(number: tf.Tensor, ids: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            looked_up = table.sparse_read(ids)
            loss = tf.reduce_mean(contenders.losses(body, looked_up, labels)[0])
        rows, *dense = tape.gradient(loss, [table, *others])
        indices, places = tf.unique(rows.indices)
        values = tf.math.unsorted_segment_sum(rows.values, places, tf.size(indices))
        common = {"lr": RATE, "epsilon": EPSILON}
        handles = {"var": table.handle, "accum": slots[0].handle}
        tf.raw_ops.ResourceSparseApplyAdagradV2(**handles, **common, grad=values, indices=indices)
        for variable, slot, gradient in zip(others, slots[1:], dense, strict=True):
            handles = {"var": variable.handle, "accum": slot.handle}
            tf.raw_ops.ResourceApplyAdagradV2(**handles, **common, grad=gradient)
        return loss

    return contenders.bare_loop(case, step)


def measure(options: Options) -> Report:
    """Measures the contenders of all numbers of rows by turns."""
    cases = [Case("embeddings", 256, 20, 3, examples=10_240, rows=rows) for rows in ROWS]
    all_contenders = {}
    for name, function in FUNCTIONS.items():
        for case in options.chosen(cases):
            given = dataclasses.replace(case, replicas=2) if name == MIRRORED else case
            all_contenders[f"{name}, {case}"] = Contender(f"benchmarks.{function}", given)
    processes, rounds = (1, 1) if options.quick else (3, 2)
    times, notes = harness.compare(all_contenders, processes, rounds)

    def ratio(one: str, other: str) -> harness.Cell:
        return spread(times[one] / times[other]) if {one, other} <= times.keys() else "–"

    targets, rows = [], []
    for case in options.chosen(cases):
        of_others = [ratio(f"{name}, {case}", f"{DDL}, {case}") for name in OTHERS]
        of_bare = ratio(f"{DDL}, {case}", f"{BARE}, {case}")
        rows.append([str(case), *of_others, of_bare])
        for name, value in zip(OTHERS, of_others, strict=True):
            if value != "–":
                targets.append(Target(f"{case}: ddl's speed / that of {name}", value, 1.0))
        targets.append(Target(f"{case}: ddl's time / the bare loop's", of_bare, 1.05, "at most"))
    grown = []
    for name in FUNCTIONS:
        few, many = (f"{name}, {rows:,} rows" for rows in ROWS)
        milliseconds = [spread(times[each], 1e3) if each in times else "–" for each in (few, many)]
        growth = ratio(many, few)
        grown.append([name, *milliseconds, growth])
        if name in (DDL, MICROBATCHES, MIRRORED) and growth != "–":
            what = f"{name}: time for {ROWS[1]:,} rows / for {ROWS[0]:,}"
            targets.append(Target(what, growth, GROWTH, "at most"))
    columns = ["", *(f"{rows:,} rows" for rows in ROWS), "growth"]
    title = "ddl's speed / the others'; its time / the bare loop's"
    tables = [Table(title, ["", *OTHERS, BARE], rows)]
    return Report([*tables, Table("Milliseconds per update", columns, grown)], targets, notes)


if __name__ == "__main__":
    harness.main(measure)
