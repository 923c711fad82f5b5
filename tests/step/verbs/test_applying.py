"""A gradient that several optimizers apply, against a plain loop."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from ddl.precision import set_precision
from tests.conftest import make_strategy
from tests.step.verbs.own_steps import Grouped, build, data, momentum

STEPS = 6


def test_groups_are_what_a_loop_without_ddl_computes():
    """Two rates and weight decays; one group is frozen for three steps.

    The norm that clips is that of all groups.
    """
    set_precision("float64")

    def plain(task):
        task.model.layers[0].layers[-1].rate = 0.0

    trainer = build(
        "Grouped",
        make_strategy("mirrored", 2),
        examples=48,
        shuffle=False,
        clip_norm=0.2,
        change=plain,
    )
    keras.utils.set_random_seed(7)
    task = Grouped()
    plain(task)
    backbone = task.model.layers[0].trainable_variables
    head = task.model.layers[-1].trainable_variables
    optimizers = [momentum(0.05, 0.3), momentum(0.02, 0.1)]
    norms = []
    for step in range(STEPS):
        rows = {k: v[16 * (step % 3) :][:16] for k, v in data(48).items()}
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(task.per_example(rows, True).loss) + sum(task.model.losses)
        own, others = tape.gradient(loss, (backbone, head))
        counted = others if step < 3 else [*own, *others]
        norm = tf.linalg.global_norm(counted)
        norms.append(float(norm))
        factor = tf.minimum(1.0, 0.2 / norm)
        if step >= 3:
            optimizers[0].apply([g * factor for g in own], backbone)
        optimizers[1].apply([g * factor for g in others], head)
    assert max(norms) > 0.2
    figures = trainer.train(STEPS)
    assert figures["gradient_norm"] == pytest.approx(np.mean(norms), rel=1e-9)
    for one, other in zip(trainer.model.variables, task.model.variables, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=0, atol=1e-12)
    assert trainer.learning_rates == pytest.approx(
        {"learning_rate/backbone": 0.05, "learning_rate/head": 0.02}
    )


def test_a_frozen_group_keeps_weights_slots_and_count():
    trainer = build("Grouped", make_strategy("mirrored", 2))
    names = [v.path for v in trainer.model.trainable_variables]
    before = [v.numpy() for v in trainer.model.trainable_variables]
    trainer.train(3)
    assert trainer.learning_rates["learning_rate/backbone"] == 0
    optimizers = trainer._update.optimizers
    assert int(optimizers["backbone"].iterations.numpy()) == 0
    assert int(optimizers["head"].iterations.numpy()) == 3
    assert not any(slot.numpy().any() for slot in optimizers["backbone"].variables[2:])
    for name, variable, was in zip(names, trainer.model.trainable_variables, before, strict=True):
        assert np.array_equal(variable.numpy(), was) == name.startswith("backbone/"), name
    trainer.train(1)
    assert int(optimizers["backbone"].iterations.numpy()) == 1
