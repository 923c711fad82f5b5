import collections
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.errors import ConfigError
from ddl.step import gradients as gradient_path
from tests.conftest import for_each_kind_on_two, make_strategy

K = keras.optimizers


def model():
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    return keras.Sequential([keras.Input((3,)), layer])


def prepare(make_optimizer):
    strategy = make_strategy("mirrored", 2)
    with strategy.scope():
        variables, optimizer = model().trainable_variables, make_optimizer()
    gradient_path.prepare_optimizer(optimizer, variables, strategy)


def trainer(make_optimizer, strategy):
    """One that minimizes (w·x - y)² for x = y = 1."""
    with strategy.scope():
        network, optimizer = model(), make_optimizer()

    class Task:
        def __init__(self):
            self.model = network

        def per_example(self, features, training):
            output = network(features["x"], training=training)[:, 0]
            return ddl.PerExample(loss=(output - features["y"]) ** 2)

    data = {"x": np.ones((8, 3), "f4"), "y": np.ones(8, "f4")}
    return ddl.Trainer(Task(), optimizer, data, global_batch_size=8, strategy=strategy)


class Wrapper(K.Optimizer):
    """Holds what it is given, and has the gradients applied by an optimizer in it."""

    def __init__(self, holder, find):
        super().__init__(0.1)
        self.holder = holder
        self.find = find

    def build(self, variables):
        super().build(variables)
        self.find(self).build(variables)

    def apply(self, gradients, variables=None):
        self.find(self).apply(gradients, variables)
        self._iterations.assign_add(1)


class MakesItInBuild(K.SGD):
    def build(self, variables):
        super().build(variables)
        if not hasattr(self, "inner"):
            self.inner = K.SGD(0.1)
            self.inner.build(variables)


class Slotted:
    __slots__ = ("inner",)

    def __init__(self, inner):
        self.inner = inner


HOLDERS = {
    "attribute": lambda: Wrapper(K.SGD(0.1), lambda self: self.holder),
    "list": lambda: Wrapper([K.SGD(0.1)], lambda self: self.holder[0]),
    "dict of tuples": lambda: Wrapper({"a": (1, K.SGD(0.1))}, lambda self: self.holder["a"][1]),
    "ordered": lambda: Wrapper(
        collections.OrderedDict(a=K.SGD(0.1)), lambda self: self.holder["a"]
    ),
    "an object": lambda: Wrapper(
        types.SimpleNamespace(inner=K.SGD(0.1)), lambda self: self.holder.inner
    ),
    "slots": lambda: Wrapper([Slotted(K.SGD(0.1))], lambda self: self.holder[0].inner),
    "made in build": lambda: MakesItInBuild(0.1),
    "OptimizerMap": lambda: K.MultiOptimizer(K.OptimizerMap(K.Adam(), {"kernel": K.SGD(0.1)})),
    "a function": lambda: K.MultiOptimizer(lambda variable: K.SGD(0.1)),
    "a wrapper in a wrapper": lambda: Wrapper(
        Wrapper(K.SGD(0.1, clipnorm=1.0), lambda self: self.holder), lambda self: self.holder
    ),
}


@pytest.mark.parametrize("make_optimizer", HOLDERS.values(), ids=HOLDERS.keys())
def test_refuses_an_optimizer_that_holds_another_one(make_optimizer):
    with pytest.raises(
        ConfigError, match=r"must not contain another optimizer, .*one plain optimizer"
    ):
        prepare(make_optimizer)


def test_refuses_keras_loss_scaling():
    with pytest.raises(ConfigError, match="LossScaleOptimizer"):
        prepare(lambda: K.LossScaleOptimizer(K.SGD(0.1)))


def test_refuses_kerass_schedule_free_optimizer():
    with pytest.raises(ConfigError, match="cannot be .*ScheduleFreeAdamW"):
        prepare(lambda: K.ScheduleFreeAdamW(0.1))


@pytest.mark.parametrize(
    ("arguments", "ours"),
    [
        ({"clipnorm": 1.0}, "clip_norm"),
        ({"global_clipnorm": 1.0}, "clip_norm"),
        ({"clipvalue": 1.0}, "clip_norm"),
        ({"gradient_accumulation_steps": 2}, "accumulation_steps"),
        ({"use_ema": True}, "weight_average"),
        ({"loss_scale_factor": 8.0}, "loss_scale"),
    ],
)
def test_refuses_what_keras_would_do_per_replica(arguments, ours):
    with pytest.raises(ConfigError, match=f"{next(iter(arguments))}.*{ours}"):
        prepare(lambda: K.SGD(0.1, **arguments))


class OwnRate(K.SGD):
    @property
    def learning_rate(self):
        return 0.5


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ("adam", "must be a keras.optimizers.Optimizer, got 'adam'. Pass an instance"),
        (K.SGD, "got the class SGD"),
        (OwnRate, "OwnRate overrides learning_rate.*LearningRateSchedule"),
        *[
            (type("Own", (K.SGD,), {name: lambda self, given: given}), f"overrides {name}.*{ours}")
            for name, ours in (
                ("scale_loss", "loss_scale"),
                ("finalize_variable_values", "weight_average"),
                ("_all_reduce_sum_gradients", "communication"),
            )
        ],
    ],
)
def test_refuses_what_it_would_leave_out(optimizer, message):
    is_own = isinstance(optimizer, type) and optimizer is not K.SGD
    with pytest.raises(ConfigError, match=message):
        prepare(lambda: optimizer(0.1) if is_own else optimizer)


def test_refuses_a_learning_rate_that_the_trace_would_freeze():
    rate = tf.constant(0.25)
    for constant in (lambda: 0.25, lambda: rate, lambda: 0.5 * tf.constant(0.5)):
        with pytest.raises(ConfigError, match=r"returns the constant 0\.25"):
            prepare(lambda constant=constant: K.SGD(constant))
    variable = tf.Variable(0.25)
    for moving in (lambda: variable, lambda: 2 * variable):
        prepare(lambda moving=moving: K.SGD(moving))


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


class FoundNowhere(K.SGD):
    """The inner optimizer is in a closure."""

    def build(self, variables):
        if not self.built:
            inner = K.SGD(0.1)
            inner.build(variables)
            self.update = lambda gradients, variables: inner.apply(gradients, variables)
        super().build(variables)

    def apply(self, gradients, variables=None):
        self.update(gradients, variables)
        self._iterations.assign_add(1)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("optimizer", [SumsAgain, Merges, FoundNowhere])
def test_refuses_a_second_sum_over_the_replicas(optimizer, replicas):
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


PLAIN = {
    **{
        name: getattr(ddl.optimizers, name)
        for name in ddl.optimizers.__all__
        if name[0].isupper() and name not in ("Group", "ParameterGroups")
    },
    **{
        name: optimizer
        for name, optimizer in vars(K).items()
        if isinstance(optimizer, type)
        and issubclass(optimizer, K.Optimizer)
        and optimizer
        not in (K.Optimizer, K.LossScaleOptimizer, K.MultiOptimizer, K.ScheduleFreeAdamW)
    },
}


@pytest.mark.parametrize("optimizer", PLAIN.values(), ids=PLAIN.keys())
def test_refuses_no_optimizer_of_keras_or_ddl(optimizer):
    trainer(lambda: optimizer(0.01), make_strategy("mirrored", 2)).trace()


def test_refuses_an_optimizer_that_was_used():
    strategy = make_strategy("mirrored", 2)
    first = trainer(lambda: K.SGD(0.1), strategy)
    first.train(3)
    with pytest.raises(ConfigError, match=r"has already made 3 updates.*Create a new optimizer"):
        trainer(lambda: first.optimizer, strategy)


def test_refuses_an_optimizer_that_was_built_for_other_variables():
    strategy = make_strategy("mirrored", 2)
    first = trainer(lambda: K.SGD(0.1), strategy)
    with pytest.raises(ConfigError, match=r"built for other variables: it has no slots for"):
        trainer(lambda: first.optimizer, strategy)


def test_takes_an_optimizer_that_was_built_for_the_same_variables():
    strategy = make_strategy("mirrored", 2)
    with strategy.scope():
        network, optimizer = model(), K.SGD(0.1, momentum=0.9)
        optimizer.build(network.trainable_variables)
    gradient_path.prepare_optimizer(optimizer, network.trainable_variables, strategy)


def test_refuses_to_go_on_where_something_else_has_used_the_optimizer():
    trained = trainer(lambda: K.SGD(0.1), make_strategy("one_device", 1))
    trained.train(2)
    trained.optimizer.iterations.assign_add(1)
    with pytest.raises(ConfigError, match=r"iterations must equal .* got 3 and 2"):
        trained.train(1)


class Holds(K.SGD):
    def __init__(self, held):
        super().__init__(0.1)
        self.held = held


def chain(length):
    end = None
    for _ in range(length):
        end = type("Link", (), {})() if end is None else _linked(end)
    return end


def _linked(to):
    link = type("Link", (), {})()
    link.to = to
    return link


@pytest.mark.parametrize("held", [np, keras, tf, chain(3000)], ids=["np", "keras", "tf", "chain"])
def test_modules_and_long_chains_are_no_optimizers(held):
    prepare(lambda: Holds(held))
