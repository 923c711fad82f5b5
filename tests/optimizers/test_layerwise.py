import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.errors import ConfigError
from ddl.optimizers import LAMB, LARS
from ddl.precision import set_precision
from tests.conftest import for_each_kind_on_two, make_strategy
from tests.optimizers.given_gradients import assert_close, drawn, updated

GAMMA, MOMENTUM, ETA, BETA = 0.3, 0.9, 0.02, 0.1
KERNELS = (0, 2)


def lars(weights, gradients, nesterov=False, epsilon=0.0, kernels=KERNELS, rates=None):
    """You et al. 2017, algorithm 1, with NumPy; with `rates` outside of the velocity."""
    weights = [w.copy() for w in weights]
    velocities = [np.zeros_like(w) for w in weights]
    after = []
    for step, each in enumerate(gradients):
        gamma, outside = (GAMMA, 1.0) if rates is None else (1.0, rates[step])
        for place, (w, v, g) in enumerate(zip(weights, velocities, each, strict=True)):
            local, decay = 1.0, 0.0
            if place in kernels:
                w_norm, g_norm = np.sqrt((w**2).sum()), np.sqrt((g**2).sum())
                decay = BETA
                if w_norm > 0 and g_norm > 0:
                    local = ETA * w_norm / (g_norm + BETA * w_norm + epsilon)
            step_of = gamma * local * (g + decay * w)
            v[:] = MOMENTUM * v + step_of
            w -= outside * ((MOMENTUM * v + step_of) if nesterov else v)
        after.append([w.copy() for w in weights])
    return after


def make_lars(rate=GAMMA, **arguments):
    arguments = {"weight_decay": BETA, "trust_coefficient": ETA, **arguments}
    return LARS(rate, MOMENTUM, **arguments)


@for_each_kind_on_two
@pytest.mark.parametrize(("nesterov", "epsilon"), [(False, 0.0), (True, 0.5)])
def test_lars_is_the_algorithm_of_the_paper(strategy, nesterov, epsilon):
    weights, gradients = drawn(8)
    arguments = {"nesterov": nesterov, "epsilon": epsilon}
    ours, _ = updated(strategy, lambda: make_lars(**arguments), weights, gradients)
    assert_close(ours, lars(weights, gradients, **arguments))


def test_lars_with_momentum_correction_keeps_the_rate_outside():
    weights, gradients = drawn(6)
    rates = [0.1, 0.5, 0.0, 0.5, 0.05, 0.3]

    class Rates(keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step):
            return tf.gather(tf.constant(rates, tf.float64), tf.cast(step, tf.int32))

    strategy = make_strategy("mirrored", 2)
    ours, _ = updated(
        strategy, lambda: make_lars(Rates(), momentum_correction=True), weights, gradients
    )
    assert_close(ours, lars(weights, gradients, rates=rates))


@pytest.mark.parametrize("zero", ["weights", "gradient", "both"])
def test_a_norm_of_zero_makes_it_plain_sgd(zero):
    weights, gradients = drawn(1)
    if zero != "gradient":
        weights[0][:] = 0
    if zero != "weights":
        gradients[0][0][:] = 0
    strategy = make_strategy("one_device", 1)
    ours, _ = updated(strategy, make_lars, weights, gradients)
    assert_close(ours, lars(weights, gradients))
    np.testing.assert_allclose(
        ours[0][0], weights[0] - GAMMA * (gradients[0][0] + BETA * weights[0]), atol=1e-15
    )


@pytest.mark.parametrize(
    ("exclude", "kernels"),
    [(None, (0, 2)), ((), (0, 1, 2, 3)), (("one/",), (2, 3)), (("one/kernel", "bias$"), (2,))],
)
def test_excluded_variables_follow_sgd_without_decay(exclude, kernels):
    weights, gradients = drawn(5)
    strategy = make_strategy("one_device", 1)
    ours, _ = updated(strategy, lambda: make_lars(exclude=exclude), weights, gradients)
    assert_close(ours, lars(weights, gradients, kernels=kernels))


def lamb(weights, gradients, kernels=KERNELS):
    """You et al. 2019, algorithm 2, with NumPy."""
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
    # Keras rounds them to float32 on their way to float64: so numbers that need no rounding.
    arguments = {"beta_1": 0.75, "beta_2": 0.9375, "epsilon": 2.0**-20}
    for decay, same in ((0.0, True), (0.125, False)):
        ours, _ = updated(
            strategy,
            lambda decay=decay: LAMB(GAMMA, weight_decay=decay, exclude=(), **arguments),
            weights,
            gradients,
        )
        theirs, _ = updated(
            strategy,
            lambda decay=decay: keras.optimizers.Lamb(
                GAMMA, weight_decay=decay or None, **arguments
            ),
            weights,
            gradients,
        )
        difference = max(np.abs(a - b).max() for a, b in zip(ours[-1], theirs[-1], strict=True))
        assert bool(difference < 1e-12) == same
        assert same or difference > 1e-3


@pytest.mark.parametrize("make", [make_lars, make_lamb])
def test_in_float32_it_differs_by_rounding(make):
    weights, gradients = drawn(8)
    strategy = make_strategy("mirrored", 2)
    ours, _ = updated(strategy, make, weights, gradients, precision="float32")
    expected, _ = updated(strategy, make, weights, gradients)
    assert ours[0][0].dtype == np.float32
    assert_close(ours, expected, atol=2e-6)


@pytest.mark.parametrize(
    ("make", "precision"),
    [
        (lambda: LARS(0.5, trust_coefficient=0.02), "mixed_float16"),
        (lambda: LAMB(0.05), "mixed_float16"),
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
        LARS(0.2, 0.8, True, 0.1, 0.01, 1e-5, ("bias$", "gamma$"), True),
        LARS(0.2),
        LAMB(0.2, 0.8, 0.9, 1e-5, 0.1, ()),
        LAMB(keras.optimizers.schedules.CosineDecay(0.1, 100)),
    ],
)
def test_its_config_makes_it_again(optimizer):
    again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert type(again) is type(optimizer)
    ours, theirs = again.get_config(), optimizer.get_config()
    assert {k: v for k, v in ours.items() if k != "exclude"} == {
        k: v for k, v in theirs.items() if k != "exclude"
    }
    assert again._exclude == optimizer._exclude


@pytest.mark.parametrize("make", [make_lars, make_lamb])
def test_a_pattern_that_finds_nothing_is_told(make):
    weights, gradients = drawn(1)
    message = "exclude: .* the pattern 'norm' matches none .*one/kernel.* Correct or remove it"
    with pytest.raises(ConfigError, match=message):
        updated(make_strategy("one_device", 1), lambda: make(exclude=["norm"]), weights, gradients)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LARS(0.1, weight_decay=-0.1), "LARS.weight_decay must be at least 0, got -0.1"),
        (
            lambda: LARS(0.1, trust_coefficient=0.0),
            "trust_coefficient must be greater than 0, got 0.0",
        ),
        (lambda: LARS(0.1, epsilon=-1.0), "LARS.epsilon must be at least 0, got -1.0"),
        (lambda: LAMB(0.1, weight_decay=-0.1), "LAMB.weight_decay must be at least 0, got -0.1"),
        (lambda: LARS(0.1, exclude="bias"), "LARS.exclude must be a list, got the text 'bias'"),
        (lambda: LAMB(0.1, exclude="bias"), "LAMB.exclude must be a list, got the text 'bias'"),
    ],
)
def test_refuses_wrong_arguments(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
