"""Optimizers that ddl refuses, and those of one's own that it takes."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.errors import ConfigError
from ddl.optimizers import LAMB, LARS, exclude_from_weight_decay
from tests.conftest import for_each_kind_on_two, make_strategy

K = keras.optimizers


def trainer(make_optimizer, strategy):
    """One that minimizes (w·x - y)² for x = y = 1."""
    with strategy.scope():
        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        network = keras.Sequential([keras.Input((3,)), layer])
        optimizer = make_optimizer()

    class Task:
        def __init__(self):
            self.model = network

        def per_example(self, features, training):
            output = network(features["x"], training=training)[:, 0]
            return ddl.PerExample(loss=(output - features["y"]) ** 2)

    data = {"x": np.ones((8, 3), "f4"), "y": np.ones(8, "f4")}
    return ddl.Trainer(Task(), optimizer, data, global_batch_size=8, strategy=strategy)


class OwnRate(K.SGD):
    @property
    def learning_rate(self):
        return 0.5


def overriding(name):
    return lambda: type("Own", (K.SGD,), {name: lambda self, given: given})(0.1)


def excluding(*patterns):
    def make():
        layers = [keras.Input((4,)), keras.layers.Dense(4, name="dense")]
        exclude_from_weight_decay(K.AdamW(), patterns).build(
            keras.Sequential(layers).trainable_variables
        )

    return make


CONSTANT = tf.constant(0.25)
REFUSED = [
    (lambda: 0.1, "must be a Keras optimizer, got 0.1. Pass an instance"),
    (lambda: K.SGD, "must be a Keras optimizer, got <class.*Pass an instance"),
    (lambda: K.SGD(0.1, clipnorm=1.0), "with clipnorm.*clip_norm"),
    (lambda: K.SGD(0.1, global_clipnorm=1.0), "with global_clipnorm.*clip_norm"),
    (lambda: K.SGD(0.1, clipvalue=1.0), "with clipvalue.*clip_norm"),
    (lambda: K.SGD(0.1, gradient_accumulation_steps=2), "accumulation_steps.*accumulation_steps"),
    (lambda: K.SGD(0.1, use_ema=True), "with use_ema.*weight_average"),
    (lambda: K.SGD(0.1, loss_scale_factor=8.0), "with loss_scale_factor.*loss_scale"),
    (lambda: K.LossScaleOptimizer(K.SGD(0.1)), "LossScaleOptimizer.*overflow on replica 0 only"),
    (lambda: K.MultiOptimizer(lambda variable: K.SGD(0.1)), "MultiOptimizer.*ParameterGroups"),
    (lambda: K.ScheduleFreeAdamW(0.1), "cannot be the ScheduleFreeAdamW"),
    (OwnRate, "OwnRate .*overrides learning_rate.*LearningRateSchedule"),
    (overriding("scale_loss"), "overrides scale_loss.*loss_scale"),
    (overriding("finalize_variable_values"), "overrides finalize_variable_v.*weight_average"),
    (overriding("_all_reduce_sum_gradients"), "overrides _all_reduce_sum_gr.*communication"),
    (lambda: K.SGD(lambda: 0.25), r"returns the constant 0\.25"),
    (lambda: K.SGD(lambda: 0.5 * CONSTANT), r"returns the constant 0\.125"),
    (lambda: LARS(0.1, weight_decay=-0.1), "LARS.weight_decay must be at least 0, got -0.1"),
    (lambda: LARS(0.1, trust_coefficient=0.0), "trust_coefficient must be greater than 0, got 0"),
    (lambda: LARS(0.1, epsilon=-1.0), "LARS.epsilon must be at least 0, got -1.0"),
    (lambda: LAMB(0.1, weight_decay=-0.1), "LAMB.weight_decay must be at least 0, got -0.1"),
    (lambda: LAMB(0.1, exclude="bias"), "LAMB.exclude must be a list, got the text 'bias'"),
    (lambda: LARS(0.1, exclude=["norm"]), "LARS.exclude: .*'norm' matches none of .*kernel"),
    (lambda: LAMB(0.1, exclude=["norm"]), "LAMB.exclude: .*'norm' matches none of .*kernel"),
    (excluding("bias", "embedding"), r"'embedding' matches none of .*dense/kernel.*Correct or"),
    (excluding("("), r"must contain regular expressions, got '\('"),
    (lambda: exclude_from_weight_decay(K.AdamW(), "bias"), "must be a list, got the text 'bias'"),
    (lambda: exclude_from_weight_decay(K.SGD(0.1)), "an optimizer with Keras's weight_decay"),
    (lambda: exclude_from_weight_decay(LARS(0.1, weight_decay=0.1)), "LARS and LAMB take `excl"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_refused_at_the_start(make, message):
    with pytest.raises(ConfigError, match=message):
        trainer(make, make_strategy("mirrored", 2))


def test_a_rate_may_be_a_function_of_a_variable():
    variable = tf.Variable(0.25)
    trainer(lambda: K.SGD(lambda: 2 * variable), make_strategy("mirrored", 2))


class SumsAgain(K.SGD):
    def apply(self, gradients, variables=None):
        context = tf.distribute.get_replica_context()
        super().apply([context.all_reduce("sum", g) for g in gradients], variables)


class Merges(K.SGD):
    def apply(self, gradients, variables=None):
        def merged(strategy, gradient):
            return strategy.extended.batch_reduce_to("SUM", [(gradient, gradient)])[0]

        context = tf.distribute.get_replica_context()
        super().apply([context.merge_call(merged, args=(g,)) for g in gradients], variables)


class Wraps(K.SGD):
    """Applies gradients by an optimizer within it."""

    def build(self, variables):
        if not self.built:
            self.inner = K.SGD(0.1, clipnorm=1.0)
            self.inner.build(variables)
        super().build(variables)

    def apply(self, gradients, variables=None):
        self.inner.apply(gradients, variables)
        self._iterations.assign_add(1)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("optimizer", [SumsAgain, Merges, Wraps])
def test_a_second_sum_over_the_replicas_is_refused(optimizer, replicas):
    trained = trainer(lambda: optimizer(0.1), make_strategy("mirrored", replicas))
    with pytest.raises(ConfigError, match="must not sum over the replicas"):
        trained.trace()
    assert "reduce_to" not in vars(trained.strategy.extended)  # what others reduce is not refused


class Doubles(K.SGD):
    def apply_gradients(self, gradients_and_variables):
        return super().apply_gradients([(2 * g, v) for g, v in gradients_and_variables])


class TakesMeans(K.SGD):
    def apply(self, gradients, variables=None):
        context = tf.distribute.get_replica_context()
        super().apply([context.all_reduce("MEAN", g) for g in gradients], variables)


@for_each_kind_on_two
@pytest.mark.parametrize(("optimizer", "factor"), [(Doubles, 2), (TakesMeans, 1)])
def test_an_optimizer_of_ones_own_takes_effect_on_any_number_of_replicas(
    strategy, optimizer, factor
):
    trained = trainer(lambda: optimizer(0.1), strategy)
    trained.train(1)
    np.testing.assert_allclose(trained.model.weights[0].numpy(), 0.2 * factor, rtol=1e-6)


_REFUSED = (K.Optimizer, K.LossScaleOptimizer, K.MultiOptimizer, K.ScheduleFreeAdamW)
TAKEN = {
    name: optimizer
    for module in (K, ddl.optimizers)
    for name, optimizer in vars(module).items()
    if isinstance(optimizer, type)
    and issubclass(optimizer, K.Optimizer)
    and optimizer not in _REFUSED
}


@pytest.mark.parametrize("optimizer", TAKEN.values(), ids=TAKEN.keys())
def test_all_others_of_keras_and_ddl_are_taken(optimizer):
    trainer(lambda: optimizer(0.01), make_strategy("mirrored", 2)).trace()


def test_an_optimizer_that_was_used_is_refused():
    strategy = make_strategy("mirrored", 2)
    first = trainer(lambda: K.SGD(0.1), strategy)
    first.train(3)
    with pytest.raises(ConfigError, match=r"has already made 3 updates.*Create a new optimizer"):
        trainer(lambda: first.optimizer, strategy)
    first.optimizer.iterations.assign_add(1)
    with pytest.raises(ConfigError, match=r"iterations must equal .* got 4 and 3"):
        first.train(1)


@pytest.mark.parametrize("built_before", [False, True])
@pytest.mark.parametrize(
    ("patterns", "expected"),
    [(None, ["dense/kernel"]), (["dense/"], ["norm/gamma", "norm/beta"])],
)
def test_variables_that_a_pattern_matches_do_not_decay(built_before, patterns, expected):
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(4, name="dense"),
            layers.BatchNormalization(name="norm"),
        ]
    )
    variables, optimizer = model.trainable_variables, K.AdamW(0.1, weight_decay=0.5)
    if built_before:
        optimizer.build(variables)
    assert exclude_from_weight_decay(optimizer, patterns) is optimizer
    for variable in variables:
        variable.assign(np.ones(variable.shape))
    optimizer.apply([np.zeros(v.shape, "f4") for v in variables], variables)
    moved = [v.path.split("/", 1)[1] for v in variables if v.numpy().min() < 1]
    assert moved == expected
