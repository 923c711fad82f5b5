"""What would not have the same bits is refused, by name and with a remedy."""

import types

import keras
import pytest
import tensorflow as tf

import ddl
from ddl.errors import ConfigError
from ddl.step.observing import RECORDS
from ddl.step.shards import checks
from tests.conftest import make_strategy

ONE = ("one_device", 1)
DATA = {"image": [[[[0.0]]]] * 16, "label": [0] * 16}


@pytest.mark.parametrize("shards", [0, 3, 6, True, 2.0, "4"])
def test_shards_must_be_a_power_of_two(shards):
    with pytest.raises(ConfigError, match=r"power of two.*got"):
        checks.check_number(shards, make_strategy(*ONE))


def test_shards_must_be_a_multiple_of_the_replicas():
    checks.check_number(4, make_strategy("mirrored", 4))
    with pytest.raises(ConfigError, match="multiple of the number of replicas, 4, got 2"):
        checks.check_number(2, make_strategy("mirrored", 4))
    with pytest.raises(ConfigError, match="multiple of the number of replicas, 3, got 8"):
        checks.check_number(8, make_strategy("mirrored", 3))


def test_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(checks, "replica_devices", lambda _: ("/device:GPU:0",))
    with pytest.raises(ConfigError, match="supports CPUs, got replicas on GPU"):
        checks.check_number(4, make_strategy(*ONE))


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"gradient_dtype": "bfloat16"}, "Trainer.gradient_dtype"),
        ({"gradient_noise_scale": ddl.GradientNoiseScale()}, "Trainer.gradient_noise_scale"),
        ({"remat": ddl.Remat()}, "Trainer.remat"),
        ({"shard_optimizer_state": True}, "Trainer.shard_optimizer_state"),
        ({"jit_compile": "on"}, "--jit_compile=off"),
        ({"global_batch_size": 12, "accumulation_steps": 2}, "multiple of 8 .* Use 8 or 16"),
        ({"batch_shards": 3}, "power of two"),
    ],
)
def test_the_trainer_refuses(argument, message):
    strategy = make_strategy(*ONE)
    with strategy.scope():
        task = ddl.Classification(ddl.models.mlp((1, 1, 1), 2, hidden_units=()))
        arguments = {"global_batch_size": 8, "strategy": strategy, "batch_shards": 4} | argument
        with pytest.raises(ConfigError, match=message):
            ddl.Trainer(task, "sgd", DATA, **arguments)


class Counting(keras.layers.Layer):
    """Counts its calls."""

    def build(self, _):
        self.count = self.add_weight(shape=[], initializer="zeros", trainable=False, name="count")


class OwnMoments(keras.layers.BatchNormalization):
    """Normalizes otherwise."""

    def call(self, inputs, training=None, mask=None):
        return super().call(inputs, training, mask)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (keras.layers.BatchNormalization, "synchronized=True, or freeze it"),
        (OwnMoments, "something else than Keras's BatchNormalization"),
        (Counting, "keeps the variables .*count"),
        (keras.layers.AugMix, "Python's random module.* use RandAugment"),
    ],
)
def test_layers_that_depend_on_the_devices_are_refused(layer, message):
    strategy = make_strategy(*ONE)
    with strategy.scope():
        built = layer(name="mine")
        built.build((None, 2) if layer is not keras.layers.AugMix else (None, 8, 8, 3))
    objective = types.SimpleNamespace(gathers=[], training_layers=[built])
    with pytest.raises(ConfigError, match=f"'mine'.*{message}"):
        checks.check_objectives([objective], strategy)


def test_covered_layers_are_not_refused():
    strategy = make_strategy(*ONE)
    with strategy.scope():
        layers = [
            keras.layers.BatchNormalization(synchronized=True),
            keras.layers.BatchNormalization(trainable=False),
            keras.layers.Dense(2),
            ddl.layers.Dropout(0.5),
        ]
        for layer in layers:
            layer.build((None, 2))
    checks.check_objectives([types.SimpleNamespace(gathers=[], training_layers=layers)], strategy)


def test_a_gather_is_refused():
    objective = types.SimpleNamespace(gathers=["call"], training_layers=[])
    with pytest.raises(ConfigError, match=r"ddl\.gather"):
        checks.check_objectives([objective], make_strategy(*ONE))


def operations_of(function):
    return tf.function(function, autograph=False).get_concrete_function().graph.get_operations()


def test_operations_that_depend_on_the_devices_are_refused():
    variable = tf.Variable(0.0)
    table = tf.lookup.experimental.MutableHashTable(tf.int32, tf.int32, 0)

    def sampled():
        classes = tf.zeros([8, 1], tf.int64)
        return tf.nn.sampled_softmax_loss(
            tf.zeros([50, 4]), tf.zeros([50]), classes, tf.zeros([8, 4]), 5, 50
        )

    def inserted():
        table.insert([1], [2])

    def within_a_branch():
        return tf.cond(tf.equal(variable, 0.0), lambda: tf.random.uniform([]), lambda: 0.0)

    for function, message in (
        (lambda: tf.random.normal([2]), r"RandomStandardNormal.*ddl\.random"),
        (within_a_branch, r"RandomUniform.*ddl\.random"),
        (lambda: tf.numpy_function(lambda: 1.0, [], tf.float64), "py_function"),
        (lambda: variable.assign_add(1.0), "write of a variable"),
        (sampled, r"LogUniformCandidateSampler.*ddl\.random"),
        (tf.function(lambda: variable * 2.0, jit_compile=True), "what XLA compiles"),
        (inserted, "LookupTableInsertV2 .*, which has a state"),
    ):
        with pytest.raises(ConfigError, match=message):
            checks.check_operations(operations_of(function))
    for function in (
        lambda: tf.square(variable),
        lambda: table.lookup(tf.constant([1])),
        lambda: tf.random.stateless_uniform([2], [1, 2], alg="auto_select"),
        lambda: tf.debugging.check_numerics(tf.square(variable), "not finite"),
    ):
        checks.check_operations(operations_of(function))


def test_operations_of_an_observer_are_passed_over():
    """They record values, also within a loop of microbatches."""

    def recorded():
        with tf.name_scope(RECORDS):
            return tf.reshape(tf.numpy_function(lambda: 1.0, [], tf.float64), [])

    def looped():
        zero = tf.zeros([], tf.float64)
        return tf.while_loop(lambda n: n < 2.0, lambda n: n + recorded(), (zero,))

    for function in (recorded, looped):
        checks.check_operations(operations_of(function))


def test_each_is_refused():
    with pytest.raises(ConfigError, match="`each`"):
        checks.check_each(lambda gradients: gradients)
    checks.check_each(None)
