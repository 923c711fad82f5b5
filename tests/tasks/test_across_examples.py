"""Losses across examples compute the same on any devices, with padding."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from ddl.precision import set_precision
from tests.conftest import LikeGpus, make_strategy
from tests.tasks.across_examples import BATCH, TASKS, build, copies, data

UPDATES = 5  # each second batch has 5 rows and 11 of padding

pytestmark = pytest.mark.usefixtures("rows_checked_on_one_device")


@functools.cache
def on_one_device(name, **options):
    trainer = build(name, make_strategy("one_device", 1), **options)
    figures = trainer.train(UPDATES)
    return figures, trainer.evaluate(), [values[0] for values in copies(trainer)]


# Task, strategy, replicas. tests/contract/test_gather.py has contrastive losses, and a step.
ELSEWHERE = [("Triplets", "central_storage", 2), ("Weighted", "mirrored", 2)]


@pytest.mark.parametrize("case", ELSEWHERE, ids=lambda case: "-".join(map(str, case)))
def test_the_same_on_any_devices(case):
    """Weights, slots, figures of training and evaluation, with a padded batch."""
    check_same(*case)


def check_same(name, kind, replicas, **options):
    figures, evaluated, values = on_one_device(name)
    strategy = make_strategy(kind, replicas) if isinstance(kind, str) else kind(replicas)
    trainer = build(name, strategy, **options)
    assert trainer.train(UPDATES) == pytest.approx(figures, abs=1e-10)
    assert trainer.evaluate() == pytest.approx(evaluated, abs=1e-10)
    for all_copies, value in zip(copies(trainer), values, strict=True):
        for copy in all_copies:
            np.testing.assert_allclose(copy, value, rtol=0, atol=1e-10)


def test_data_from_the_host_are_gathered_in_the_same_order():
    check_same("Triplets", "mirrored", 2, data_on_device=False)


def test_by_the_path_of_gpus(gpu_path):
    check_same("Triplets", LikeGpus, 2)


@pytest.mark.parametrize("name", ["Triplets", "Covariances", "BarlowTwins"])
def test_what_a_loop_without_padding_computes(name):
    """A batch of 16 rows and one of 5, each as a whole, by a loop without ddl."""
    check_loop(name, "mirrored", 2)


def check_loop(name, kind, replicas):
    made = {"dropout": False}
    trainer = build(name, make_strategy(kind, replicas), made=made, shuffle=False)
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


@pytest.mark.parametrize("precision", ["mixed_float16", "mixed_bfloat16"])
def test_in_half_precision(precision):
    """One update, where only rounding differs; all replicas stay equal to the bit."""
    made, tolerance = {"dropout": False}, {"mixed_float16": 1e-3, "mixed_bfloat16": 1e-2}[precision]
    values = []
    for replicas in (1, 2):
        trainer = build(
            "Weighted",
            make_strategy("mirrored", replicas),
            precision=precision,
            made=made,
        )
        before = [one[0] for one in copies(trainer)]
        trainer.train(1)
        for first, *others in copies(trainer):
            for other in others:
                np.testing.assert_array_equal(first, other)
        values.append([one[0] - old for one, old in zip(copies(trainer), before, strict=True)])
    largest = max(np.abs(change).max() for change in values[0])
    assert largest > 10 * tolerance
    for other in values[1:]:
        for one, two in zip(values[0], other, strict=True):
            np.testing.assert_allclose(one, two, atol=tolerance)
