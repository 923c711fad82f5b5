"""Optimizers that ddl refuses, and those of one's own that it takes."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.errors import ConfigError
from ddl.optimizers import LAMB, LARS, Group, ParameterGroups, exclude_from_weight_decay
from ddl.optimizers.checks import prepare_optimizer
from tests.conftest import make_strategy
from tests.contract.builders import make_trainer

K = keras.optimizers


def trainer(make_optimizer):
    def task():
        return ddl.Regression(keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]))

    return make_trainer((task, make_optimizer), (np.ones((8, 3)), np.ones(8)))


class OwnRate(K.SGD):
    @property
    def learning_rate(self):
        return 0.5


CONSTANT = tf.constant(0.25)
REFUSED = [
    (lambda: K.SGD(0.1, loss_scale_factor=8.0), "with loss_scale_factor.*loss_scale"),
    (lambda: K.MultiOptimizer(lambda variable: K.SGD(0.1)), "MultiOptimizer.*ParameterGroups"),
    (OwnRate, "OwnRate .*overrides learning_rate.*LearningRateSchedule"),
    (lambda: K.SGD(lambda: 0.5 * CONSTANT), r"returns the constant 0\.125"),
    (lambda: LARS(0.1, weight_decay=-0.1), "LARS.weight_decay must be at least 0, got -0.1"),
    (lambda: LAMB(0.1, exclude=["norm"]), "LAMB.exclude: .*'norm' matches none of .*kernel"),
    (lambda: ParameterGroups({"head": "adam"}), "Group.optimizer must be a Keras optimizer"),
    (lambda: exclude_from_weight_decay(K.SGD(0.1)), "an optimizer with Keras's weight_decay"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_refused_at_the_start(make, message):
    with pytest.raises(ConfigError, match=message):
        trainer(make)


class SumsAgain(K.SGD):
    def apply(self, gradients, variables=None):
        context = tf.distribute.get_replica_context()
        super().apply([context.all_reduce("sum", g) for g in gradients], variables)


def test_a_second_sum_over_the_replicas_is_refused():
    trained = trainer(lambda: SumsAgain(0.1))
    with pytest.raises(ConfigError, match="must not sum over the replicas"):
        trained.trace()
    assert "reduce_to" not in vars(trained.strategy.extended)  # what others reduce is not refused


_REFUSED = (K.Optimizer, K.LossScaleOptimizer, K.MultiOptimizer, K.ScheduleFreeAdamW)
TAKEN = {
    name: optimizer
    for module in (K, ddl.optimizers)
    for name, optimizer in vars(module).items()
    if isinstance(optimizer, type)
    and issubclass(optimizer, K.Optimizer)
    and optimizer not in _REFUSED
}


def test_all_others_of_keras_and_ddl_are_taken():
    """Each updates the layer of its name, in one trace."""
    layers = [keras.layers.Dense(3, use_bias=False, name=name) for name in TAKEN]
    network, data = keras.Sequential([keras.Input((3,)), *layers]), (np.ones((8, 3)),) * 2
    groups = {name: Group(kind(0.01), [f"(^|/){name}/"]) for name, kind in TAKEN.items()}
    optimizer = ParameterGroups(groups)
    ddl.Trainer(ddl.Regression(network), optimizer, data, global_batch_size=8).trace()


def test_variables_that_a_pattern_matches_do_not_decay():
    dense, norm = keras.layers.Dense(4, name="dense"), keras.layers.BatchNormalization(name="norm")
    model = keras.Sequential([keras.Input((4,)), dense, norm])
    variables, optimizer = model.trainable_variables, K.AdamW(0.1, weight_decay=0.5)
    for variable in variables:
        variable.assign(np.ones(variable.shape))
    exclude_from_weight_decay(exclude_from_weight_decay(optimizer), ["bias$"])  # adds to the first
    optimizer.apply([np.zeros(v.shape, "f4") for v in variables], variables)
    assert [v.path for v in variables if v.numpy().min() < 1] == [dense.kernel.path]


def test_refuses_an_optimizer_made_outside_the_scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    given = keras.optimizers.SGD(0.1), model.trainable_variables, make_strategy("mirrored", 2)
    with pytest.raises(ConfigError, match="outside the strategy's scope"):
        prepare_optimizer(*given)
