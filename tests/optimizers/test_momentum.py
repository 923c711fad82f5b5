import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.checkpoints.checkpoints import Checkpoints
from ddl.optimizers import LARS, MomentumSGD
from ddl.precision import set_precision
from tests.conftest import make_strategy, save
from tests.optimizers.given_gradients import assert_close, drawn, updated

# Down, up by a lot, through zero, and back.
RATES = [0.1, 0.1, 0.01, 0.4, 0.4, 0.0, 0.0, 0.2, 0.05]


class Rates(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step):
        return tf.gather(tf.constant(RATES, tf.float64), tf.cast(step, tf.int32))


def rate_outside(weights, gradients, momentum, nesterov):
    """The velocity of Goyal et al.'s equation 9, with NumPy."""
    weights = [w.copy() for w in weights]
    velocities = [np.zeros_like(w) for w in weights]
    after = []
    for rate, each in zip(RATES, gradients, strict=True):
        for w, v, g in zip(weights, velocities, each, strict=True):
            v[:] = momentum * v + g
            w -= rate * ((g + momentum * v) if nesterov else v)
        after.append([w.copy() for w in weights])
    return after


@pytest.mark.parametrize("nesterov", [False, True])
def test_correction_is_the_rate_outside_of_the_velocity(strategy, nesterov):
    weights, gradients = drawn(len(RATES))
    ours, _ = updated(
        strategy, lambda: MomentumSGD(Rates(), 0.9, nesterov=nesterov), weights, gradients
    )
    assert_close(ours, rate_outside(weights, gradients, 0.9, nesterov))


def test_correction_is_the_factor_of_the_paper():
    """v ← m·(η_t / η_(t-1))·v + η_t·g, where no rate is zero."""
    used = [rate for rate in RATES if rate]
    weights, gradients = drawn(len(used))

    class NoneZero(keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step):
            return tf.gather(tf.constant(used, tf.float64), tf.cast(step, tf.int32))

    expected, velocities, now = [], [np.zeros_like(w) for w in weights], weights
    for step, (rate, each) in enumerate(zip(used, gradients, strict=True)):
        factor = 0.9 * rate / used[max(step - 1, 0)]
        velocities = [factor * v + rate * g for v, g in zip(velocities, each, strict=True)]
        now = [w - v for w, v in zip(now, velocities, strict=True)]
        expected.append(now)
    make = make_strategy("one_device", 1)
    ours, _ = updated(make, lambda: MomentumSGD(NoneZero(), 0.9), weights, gradients)
    assert_close(ours, expected)
    keras_way, _ = updated(
        make,
        lambda: MomentumSGD(NoneZero(), 0.9, momentum_correction=False),
        weights,
        gradients,
    )
    assert np.abs(keras_way[-1][0] - expected[-1][0]).max() > 0.1


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("correction", [False, True])
def test_is_keras_sgd_while_the_rate_stays(correction, nesterov):
    strategy = make_strategy("mirrored", 2)
    weights, gradients = drawn(6)
    # Keras rounds them to float32 on their way to float64: so numbers that need no rounding.
    arguments = {"momentum": 0.875, "nesterov": nesterov, "weight_decay": 0.125}
    ours, _ = updated(
        strategy,
        lambda: MomentumSGD(0.1, momentum_correction=correction, **arguments),
        weights,
        gradients,
    )
    theirs, _ = updated(
        strategy, lambda: keras.optimizers.SGD(0.1, **arguments), weights, gradients
    )
    assert_close(ours, theirs)


@pytest.mark.parametrize("make", [lambda: MomentumSGD(0.1), lambda: LARS(0.1, weight_decay=0.1)])
def test_a_sparse_gradient_is_as_good_as_the_dense_one(strategy, make):
    weights, gradients = drawn(3)
    values, rows = np.array([[1.0, 2.0], [3.0, 4.0], [0.5, 0.0]]), [2, 0, 2]
    dense = np.zeros((3, 2))
    np.add.at(dense, rows, values)

    def sparse():
        return tf.IndexedSlices(tf.constant(values), tf.constant(rows), tf.constant([3, 2]))

    ours, _ = updated(strategy, make, weights, [[sparse, *g[1:]] for g in gradients])
    expected, _ = updated(strategy, make, weights, [[dense, *g[1:]] for g in gradients])
    assert_close(ours, expected)


def make_trainer(strategy, optimizer):
    set_precision("float32")
    keras.utils.set_random_seed(3)
    random = np.random.default_rng(0)
    with strategy.scope():
        task = ddl.Classification(ddl.models.mlp((4,), 3, hidden_units=(8,)))
        return ddl.Trainer(
            task,
            optimizer(),
            {"image": random.normal(size=(64, 4)), "label": random.integers(0, 3, 64)},
            global_batch_size=16,
        )


@pytest.mark.parametrize("make", [MomentumSGD, LARS])
def test_goes_on_bitwise_after_the_rate_has_changed(tmp_path, make):
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([3, 5], [0.1, 0.4, 0.02])
    straight, first, second = (
        make_trainer(make_strategy("mirrored", 2), lambda: make(schedule, momentum_correction=True))
        for _ in "abc"
    )
    straight.train(9)
    first.train(5)
    save(tmp_path, first)
    Checkpoints(tmp_path, second).restore_latest()
    second.train(4)
    for one, other in zip(
        [*straight.model.variables, *straight.optimizer.variables],
        [*second.model.variables, *second.optimizer.variables],
        strict=True,
    ):
        np.testing.assert_array_equal(one.numpy(), other.numpy())


def test_its_config_makes_it_again():
    optimizer = MomentumSGD(0.2, 0.8, nesterov=True, momentum_correction=False)
    again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert type(again) is MomentumSGD
    assert again.get_config() == optimizer.get_config()
