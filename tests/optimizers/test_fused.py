"""Keras's optimizers by TensorFlow's kernels, against the same classes outside of ddl."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from ddl.optimizers.checks import prepare_optimizer
from ddl.optimizers.fused import by_kernels
from ddl.step.rows import merge_duplicates
from tests.conftest import make_strategy

K = keras.optimizers
SHAPES = ((40, 3), (5,), ())
SCHEDULE = K.schedules.ExponentialDecay(0.02, 10, 0.9)
UPDATES = 20

# With the number of kernels of an update with dense gradients, and with a sparse one of the first.
CASES = {
    "SGD": (lambda: K.SGD(SCHEDULE), 3, 2),
    "SGD, momentum": (lambda: K.SGD(0.01, momentum=0.9), 3, 3),
    "SGD, nesterov": (lambda: K.SGD(SCHEDULE, 0.9, nesterov=True, weight_decay=0.02), 3, 3),
    "Adam": (lambda: K.Adam(SCHEDULE, beta_1=0.5, beta_2=0.9, epsilon=1e-3), 3, 3),
    "Adam, decay": (lambda: K.Adam(0.01, weight_decay=0.1), 3, 3),
    "AMSGrad": (lambda: K.Adam(0.01, amsgrad=True), 0, 0),
    "AdamW": (lambda: K.AdamW(SCHEDULE, weight_decay=0.1), 3, 3),
    "Adagrad": (lambda: K.Adagrad(0.01, weight_decay=0.1), 0, 0),
    "Adagrad from 0": (lambda: K.Adagrad(0.01, initial_accumulator_value=0.0), 0, 0),
    "RMSprop": (lambda: K.RMSprop(0.01, momentum=0.9), 0, 0),
    "a subclass": (lambda: type("Own", (K.Adam,), {})(0.01), 0, 0),
}


def gradients(step, sparse):
    """Drawn from a fixed stream; the sparse one names some rows twice."""
    random = np.random.default_rng(step)
    drawn = [tf.constant(random.normal(size=shape)) for shape in SHAPES]
    if sparse:
        rows = random.integers(0, 40, 12)
        rows[:2] = rows[2:4]
        drawn[0] = tf.IndexedSlices(
            tf.gather(drawn[0], rows), tf.constant(rows), tf.constant([40, 3])
        )
    return drawn


def made(make):
    random, optimizer = np.random.default_rng(0), make()
    weights = [
        keras.Variable(random.normal(size=shape), dtype="float64", name=f"v{place}")
        for place, shape in enumerate(SHAPES)
    ]
    if optimizer.weight_decay is not None:
        optimizer.exclude_from_weight_decay(var_names=["v1"])
    return weights, optimizer


def outside(make, sparse):
    """The variables and slots after updates by the plain class, eager and without ddl."""
    weights, optimizer = made(make)
    for step in range(UPDATES):
        dense = [tf.convert_to_tensor(g) for g in gradients(step, sparse)]
        optimizer.apply(dense, weights)
    return [v.numpy().astype("f8") for v in (*weights, *optimizer.variables)]


def within(strategy, make, sparse):
    """As `outside`, as a trainer updates; and the number of kernels in a trace."""
    with strategy.scope():
        weights, optimizer = made(make)
    prepare_optimizer(optimizer, weights, strategy)

    @tf.function(autograph=False, reduce_retracing=True)
    def update(each):
        with by_kernels([optimizer]):
            strategy.run(lambda each: optimizer.apply(each, weights), args=(each,))

    for step in range(UPDATES):
        update([merge_duplicates(g) for g in gradients(step, sparse)])
    assert "update_step" not in vars(optimizer)  # the instance is as it was
    each = [merge_duplicates(g) for g in gradients(0, sparse)]
    operations = update.get_concrete_function(each).graph.get_operations()
    kernels = sum("ResourceApply" in operation.type for operation in operations)
    return [v.numpy().astype("f8") for v in (*weights, *optimizer.variables)], kernels


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "rows"])
@pytest.mark.parametrize("name", CASES)
def test_equals_the_plain_class_over_20_updates(name, sparse):
    make, *kernels = CASES[name]
    ours, found = within(make_strategy("one_device", 1), make, sparse)
    for one, other in zip(ours, outside(make, sparse), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-14, atol=1e-14)
    assert found == kernels[sparse]


@pytest.mark.parametrize("make", [lambda: K.SGD(0.1), lambda: K.Adagrad(0.1)])
def test_rows_alone_are_read_and_written(make):
    """An update of a large table takes time for the rows of the batch."""
    table, optimizer = keras.Variable(np.zeros((1000, 2)), dtype="float32"), make()
    optimizer.build([table])

    @tf.function(autograph=False)
    def update():
        rows = tf.IndexedSlices(tf.ones([2, 2]), tf.constant([1, 3]), tf.constant([1000, 2]))
        with by_kernels([optimizer]):
            optimizer.apply([rows], [table])

    operations = update.get_concrete_function().graph.get_operations()
    sizes = [output.shape.num_elements() for op in operations for output in op.outputs]
    assert max(size or 0 for size in sizes) < 1000
