"""Losses across examples compute the same on any devices, with padding."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from ddl.precision import set_precision
from tests.conftest import LikeGpus, make_strategy, name_of
from tests.step.across_examples.tasks import BATCH, TASKS, build, copies, data

UPDATES = 5  # each second batch has 5 rows and 11 of padding

pytestmark = pytest.mark.usefixtures("rows_checked_on_one_device")


@functools.cache
def on_one_device(name, **options):
    trainer = build(name, make_strategy("one_device", 1), **options)
    figures = trainer.train(UPDATES)
    return figures, trainer.evaluate(), [values[0] for values in copies(trainer)]


# Strategy, replicas, microbatches.
ELSEWHERE = [("mirrored", 4, 1), ("central_storage", 2, 1), ("one_device", 1, 4), ("mirrored", 2, 2)]


@pytest.mark.parametrize("where", ELSEWHERE, ids=name_of)
@pytest.mark.parametrize("name", TASKS)
def test_the_same_on_any_devices(name, where):
    """Weights, slots, figures of training and evaluation, with a padded batch."""
    check_same(name, *where)


def check_same(name, kind, replicas, accumulation_steps=1, **options):
    figures, evaluated, values = on_one_device(name)
    strategy = make_strategy(kind, replicas) if isinstance(kind, str) else kind(replicas)
    trainer = build(name, strategy, accumulation_steps=accumulation_steps, **options)
    assert trainer.train(UPDATES) == pytest.approx(figures, abs=1e-10)
    assert trainer.evaluate() == pytest.approx(evaluated, abs=1e-10)
    for all_copies, value in zip(copies(trainer), values, strict=True):
        for copy in all_copies:
            np.testing.assert_allclose(copy, value, rtol=0, atol=1e-10)


def test_data_from_the_host_are_gathered_in_the_same_order():
    check_same("Triplets", "mirrored", 2, data_on_device=False)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_by_the_path_of_gpus(microbatches, gpu_path):
    check_same("Triplets", LikeGpus, 2, microbatches)


@pytest.mark.parametrize("where", [("mirrored", 2, 1), ("mirrored", 2, 2)], ids=name_of)
@pytest.mark.parametrize("name", ["InfoNce", "Triplets", "Covariances"])
def test_what_a_loop_without_padding_computes(name, where):
    """A batch of 16 rows and one of 5, each as a whole, by a loop without ddl."""
    check_loop(name, *where)


def check_loop(name, kind, replicas, accumulation_steps):
    made = {"dropout": False}
    trainer = build(
        name,
        make_strategy(kind, replicas),
        made=made,
        shuffle=False,
        accumulation_steps=accumulation_steps,
    )
    trainer.train(4)
    set_precision("float64")
    keras.utils.set_random_seed(7)
    task = TASKS[name](**made)
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    whole = data()
    for step in range(4):
        rows = {k: v[:BATCH] if step % 2 == 0 else v[BATCH:] for k, v in whole.items()}
        number = len(rows["x"])
        task.gather = lambda x, number=number: _Whole(x, number)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(task.per_example(rows, True).loss)
        variables = task.model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)
    for ours, theirs in zip(trainer.model.variables, task.model.variables, strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=0, atol=1e-12)


class _Whole:
    """What `ddl.gather` returns for a whole batch."""

    def __init__(self, x, number):
        self.rows, self.mask = x, tf.ones([number], tf.bool)
        self.own = tf.range(number, dtype=tf.int64)


@pytest.mark.parametrize("precision", ["mixed_float16", "mixed_bfloat16", "float32"])
def test_in_other_precisions(precision):
    """The first update, where only rounding differs; then all replicas stay equal."""
    made = {"dropout": False}
    tolerance = {"mixed_float16": 3e-3, "mixed_bfloat16": 3e-2, "float32": 1e-5}[precision]
    trainers = [
        build("Weighted", strategy, precision=precision, made=made, change=in_its_dtype)
        for strategy in (make_strategy("one_device", 1), make_strategy("mirrored", 2))
    ]
    trainers.append(
        build(
            "Weighted",
            make_strategy("mirrored", 2),
            precision=precision,
            made=made,
            change=in_its_dtype,
            accumulation_steps=2,
        )
    )
    values = []
    for trainer in trainers:
        trainer.train(1)
        for first, *others in copies(trainer):
            for other in others:
                np.testing.assert_array_equal(first, other)
        values.append([one[0] for one in copies(trainer)])
    for other in values[1:]:
        for one, two in zip(values[0], other, strict=True):
            np.testing.assert_allclose(one, two, atol=tolerance)


def in_its_dtype(task):
    """Gathers in the dtype of the model's output."""
    gather = task.gather
    task.gather = lambda x: gather(tf.cast(x, task.model.compute_dtype))
    per_example = task.per_example

    def cast(features, training):
        return per_example({**features, "x": features["x"]}, training)

    task.per_example = cast
