"""MomentumSGD, LARS and LAMB against their papers, with NumPy."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.optimizers import LAMB, LARS, MomentumSGD
from ddl.precision import set_precision
from tests.conftest import for_each_kind_on_two, make_strategy
from tests.optimizers.given_gradients import assert_close, drawn, updated

# Keras rounds momentum to float32 on its way to float64: so a number that needs no rounding.
GAMMA, MOMENTUM, ETA, BETA = 0.3, 0.875, 0.02, 0.1
KERNELS = (0, 2)
# Down, up by a lot, through zero, and back.
RATES = [0.1, 0.1, 0.01, 0.4, 0.4, 0.0, 0.0, 0.2, 0.05]


class Rates(keras.optimizers.schedules.LearningRateSchedule):
    def __init__(self, rates):
        self.rates = rates

    def __call__(self, step):
        return tf.gather(tf.constant(self.rates, tf.float64), tf.cast(step, tf.int32))


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_keeps_the_rate_outside_of_the_velocity(nesterov):
    start, gradients = drawn(len(RATES))
    weights = [w.copy() for w in start]
    velocities = [np.zeros_like(w) for w in weights]
    expected = []
    for rate, each in zip(RATES, gradients, strict=True):
        for w, v, g in zip(weights, velocities, each, strict=True):
            v[:] = 0.9 * v + g
            w -= rate * ((g + 0.9 * v) if nesterov else v)
        expected.append([w.copy() for w in weights])
    strategy = make_strategy("mirrored", 2)
    ours, _ = updated(strategy, lambda: MomentumSGD(Rates(RATES), 0.9, nesterov), start, gradients)
    assert_close(ours, expected)


def lars(weights, gradients, nesterov=False, epsilon=0.0, kernels=KERNELS):
    """You et al. 2017, algorithm 1."""
    weights = [w.copy() for w in weights]
    velocities = [np.zeros_like(w) for w in weights]
    after = []
    for each in gradients:
        for place, (w, v, g) in enumerate(zip(weights, velocities, each, strict=True)):
            local, decay = 1.0, 0.0
            if place in kernels:
                w_norm, g_norm = np.sqrt((w**2).sum()), np.sqrt((g**2).sum())
                decay = BETA
                if w_norm > 0 and g_norm > 0:
                    local = ETA * w_norm / (g_norm + BETA * w_norm + epsilon)
            step = GAMMA * local * (g + decay * w)
            v[:] = MOMENTUM * v + step
            w -= (MOMENTUM * v + step) if nesterov else v
        after.append([w.copy() for w in weights])
    return after


def make_lars(**arguments):
    arguments = {"weight_decay": BETA, "trust_coefficient": ETA, **arguments}
    return LARS(GAMMA, MOMENTUM, **arguments)


@for_each_kind_on_two
@pytest.mark.parametrize(("nesterov", "epsilon"), [(False, 0.0), (True, 0.5)])
def test_lars_is_the_algorithm_of_the_paper(strategy, nesterov, epsilon):
    weights, gradients = drawn(8)
    arguments = {"nesterov": nesterov, "epsilon": epsilon}
    ours, _ = updated(strategy, lambda: make_lars(**arguments), weights, gradients)
    assert_close(ours, lars(weights, gradients, **arguments))


@pytest.mark.parametrize("zero", ["weights", "gradient", "both"])
def test_a_norm_of_zero_makes_it_plain_sgd(zero):
    weights, gradients = drawn(1)
    if zero != "gradient":
        weights[0][:] = 0
    if zero != "weights":
        gradients[0][0][:] = 0
    ours, _ = updated(make_strategy("one_device", 1), make_lars, weights, gradients)
    assert_close(ours, lars(weights, gradients))


@pytest.mark.parametrize(
    ("exclude", "kernels"), [((), (0, 1, 2, 3)), (("one/kernel", "bias$"), (2,))]
)
def test_excluded_variables_follow_sgd_without_decay(exclude, kernels):
    weights, gradients = drawn(5)
    strategy = make_strategy("one_device", 1)
    ours, _ = updated(strategy, lambda: make_lars(exclude=exclude), weights, gradients)
    assert_close(ours, lars(weights, gradients, kernels=kernels))


def lamb(weights, gradients, kernels=KERNELS):
    """You et al. 2019, algorithm 2."""
    weights = [w.copy() for w in weights]
    moments = [(np.zeros_like(w), np.zeros_like(w)) for w in weights]
    after = []
    for t, each in enumerate(gradients, start=1):
        for place, (w, (m, v), g) in enumerate(zip(weights, moments, each, strict=True)):
            m[:] = 0.8 * m + 0.2 * g
            v[:] = 0.95 * v + 0.05 * g**2
            r = (m / (1 - 0.8**t)) / (np.sqrt(v / (1 - 0.95**t)) + 1e-6)
            ratio = 1.0
            if place in kernels:
                r = r + BETA * w
                norms = np.sqrt((w**2).sum()), np.sqrt((r**2).sum())
                ratio = norms[0] / norms[1] if min(norms) > 0 else 1.0
            w -= GAMMA * ratio * r
        after.append([w.copy() for w in weights])
    return after


def make_lamb(**arguments):
    return LAMB(GAMMA, 0.8, 0.95, weight_decay=BETA, **arguments)


@for_each_kind_on_two
@pytest.mark.parametrize(("exclude", "kernels"), [(None, (0, 2)), ((), (0, 1, 2, 3))])
def test_lamb_is_the_algorithm_of_the_paper(strategy, exclude, kernels):
    weights, gradients = drawn(8)
    ours, _ = updated(strategy, lambda: make_lamb(exclude=exclude), weights, gradients)
    assert_close(ours, lamb(weights, gradients, kernels))


def test_lamb_with_norms_of_zero():
    weights, gradients = drawn(2)
    weights[0][:] = 0
    gradients[0][2][:] = 0
    ours, _ = updated(make_strategy("one_device", 1), make_lamb, weights, gradients)
    assert_close(ours, lamb(weights, gradients))


def test_keras_lamb_is_the_paper_without_decay_alone():
    """If it is so with decay too one day, LAMB can go."""
    weights, gradients = drawn(3)
    strategy = make_strategy("one_device", 1)
    arguments = {"beta_1": 0.75, "beta_2": 0.9375, "epsilon": 2.0**-20}
    for decay, same in ((0.0, True), (0.125, False)):
        makes = (
            lambda decay=decay: LAMB(GAMMA, weight_decay=decay, exclude=(), **arguments),
            lambda decay=decay: keras.optimizers.Lamb(
                GAMMA, weight_decay=decay or None, **arguments
            ),
        )
        ours, theirs = (updated(strategy, make, weights, gradients)[0][-1] for make in makes)
        difference = max(np.abs(a - b).max() for a, b in zip(ours, theirs, strict=True))
        assert difference < 1e-12 if same else difference > 1e-3


@pytest.mark.parametrize(
    ("make", "precision"),
    [
        (lambda: LARS(0.5, trust_coefficient=0.02), "mixed_float16"),
        (lambda: LAMB(0.05), "mixed_bfloat16"),
    ],
)
def test_trains_in_half_precision(make, precision):
    """The tests against the papers train in float64."""
    set_precision(precision)
    keras.utils.set_random_seed(3)
    strategy = make_strategy("mirrored", 2)
    labels = np.random.default_rng(0).integers(0, 3, 96)
    images = np.eye(3)[labels] + np.random.default_rng(1).normal(size=(96, 3)) / 4
    with strategy.scope():
        task = ddl.Classification(ddl.models.mlp((3,), 3, hidden_units=(8,), input_scale=1.0))
        trainer = ddl.Trainer(task, make(), (images, labels), global_batch_size=32)
    first = trainer.train(1)["loss"]
    trainer.train(28)
    assert trainer.train(1)["loss"] < first / 2


@pytest.mark.parametrize(
    "optimizer",
    [
        MomentumSGD(0.2, 0.8, nesterov=True),
        LARS(0.2, 0.8, True, 0.1, 0.01, 1e-5, ("bias$", "gamma$")),
        LAMB(keras.optimizers.schedules.CosineDecay(0.1, 100), 0.8, 0.9, 1e-5, 0.1, ()),
    ],
    ids=lambda optimizer: type(optimizer).__name__,
)
def test_its_config_makes_it_again(optimizer):
    again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert type(again) is type(optimizer)
    ours, theirs = again.get_config(), optimizer.get_config()
    assert {**ours, "exclude": ()} == {**theirs, "exclude": ()}
    assert getattr(again, "_exclude", None) == getattr(optimizer, "_exclude", None)
