"""Which pieces are compiled, and the messages for a model that XLA cannot compile."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.distribute import distribute_lib
from tensorflow.python.framework.config import is_op_determinism_enabled

import ddl
from ddl.distribution import path as device_path
from ddl.errors import ConfigError
from ddl.precision import set_precision
from ddl.step import compiled
from ddl.step.compiled import Compiler, as_only_replica
from tests.conftest import make_strategy

DATA = np.ones((8, 4, 4, 1), "f4"), np.arange(8) % 2


class Warped(keras.layers.Layer):
    """An operation that XLA does not have."""

    def call(self, images):
        return tf.raw_ops.ImageProjectiveTransformV3(
            images=images,
            transforms=tf.constant([[1.0, 0, 0, 0, 1, 0, 0, 0]]),
            output_shape=tf.constant([4, 4]),
            fill_value=0.0,
            interpolation="NEAREST",
            fill_mode="CONSTANT",
        )


class Summed(keras.layers.Layer):
    def call(self, images):
        context = tf.distribute.get_replica_context()
        return images if context is None else context.all_reduce("SUM", images)


def normalization():
    return keras.layers.BatchNormalization(name="shared_moments")


def trainer(layer, strategy=None, jit_compile="on", **arguments):
    strategy = strategy or make_strategy("one_device", 1)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        layers = [layer(), keras.layers.Flatten(), keras.layers.Dense(2)]
        model = keras.Sequential([keras.Input((4, 4, 1)), *layers])
        return ddl.Trainer(
            ddl.Classification(model),
            keras.optimizers.SGD(0.1),
            DATA,
            global_batch_size=4,
            jit_compile=jit_compile,
            **arguments,
        )


@pytest.mark.parametrize(
    ("layer", "replicas", "words"),
    [
        (lambda: Warped(name="warp"), 1, ["warp", "/ImageProjectiveTransformV3"]),
        (normalization, 2, ["shared_moments", "sums over the replicas"]),
        (lambda: Summed(name="summed"), 2, ["across replicas"]),
    ],
    ids=["operation", "normalization", "collective"],
)
def test_a_layer_that_cannot_be_compiled_is_named_before_training(layer, replicas, words):
    made = trainer(layer, make_strategy("mirrored", 2) if replicas == 2 else None)
    with pytest.raises(ConfigError) as raised:
        made.trace()
    for word in ["jit_compile=on", "training", *words, "jit_compile=auto"]:
        assert word in str(raised.value)
    assert made.step == 0


@pytest.fixture
def compiling(monkeypatch):
    """Makes `auto` compile on CPUs."""
    monkeypatch.setattr(device_path, "CPU", dataclasses.replace(device_path.CPU, compiles=True))


def test_auto_goes_without_and_says_so_without_naming_a_flag(compiling, caplog):
    made = trainer(lambda: Warped(name="warp"), jit_compile="auto", eval_data=DATA)
    made.train(2)
    made.evaluate()
    texts = [record.getMessage() for record in caplog.records]
    said = [text for text in texts if "ImageProjectiveTransformV3" in text]
    assert [text.split()[0] for text in said if "--" not in text] == ["Training", "Evaluation"]


def test_compiles_on_gpus_alone_unless_asked(monkeypatch):
    strategy = make_strategy("one_device", 1)
    assert not Compiler("auto", strategy, "training").is_on
    assert Compiler("on", strategy, "training").is_on
    with device_path.taking(device_path.GPU):
        assert Compiler("auto", strategy, "training").is_on
        assert not Compiler("off", strategy, "training").is_on
        monkeypatch.setattr(compiled, "is_op_determinism_enabled", lambda: True)
        assert not Compiler("auto", strategy, "training").is_on
    with device_path.taking(device_path.TPU):
        assert not Compiler("on", strategy, "training").is_on
    with pytest.raises(ConfigError, match="CentralStorageStrategy, which keeps them elsewhere"):
        Compiler("on", make_strategy("central_storage", 2), "training")


def pieces(made):
    """Names of the compiled functions that an update calls."""
    loop = made._runner.loop
    made.trace()
    functions = loop._concrete(made.state).graph.as_graph_def().library.function
    return [f.signature.name for f in functions if f.attr["_XlaMustCompile"].b]


def test_the_update_is_compiled_where_a_layer_communicates(compiling):
    set_precision("float64")
    arguments = {"clip_norm": 0.1, "weight_average": ddl.ExponentialMovingAverage()}
    strategy = make_strategy("mirrored", 2)
    found, plain = (trainer(normalization, strategy, x, **arguments) for x in ("auto", "off"))
    # Update and average of each replica, and the sums; no passes.
    assert len(pieces(found)) == 2 * 2 + 1
    assert not pieces(plain)
    for one in (found, plain):
        one.train(3)
    for ours, theirs in zip(found.model.get_weights(), plain.model.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)


def test_names_that_are_private_to_tensorflow_and_keras():
    assert is_op_determinism_enabled() is False
    assert distribute_lib.get_update_replica_id() is None
    strategy = make_strategy("mirrored", 2)
    with strategy.scope():
        variable = keras.Variable(np.ones(2, "f4"))
        optimizer = keras.optimizers.Adam()
        optimizer.build([variable])
    distributed = variable.value
    assert optimizer._distribution_strategy is strategy

    @tf.function(autograph=False)
    def run():
        def own():
            replica = tf.distribute.get_replica_context()._local_replica_id
            with as_only_replica([variable], [optimizer]):
                assert optimizer._distribution_strategy.num_replicas_in_sync == 1
                assert variable.value is distributed.values[replica]
                variable.assign(variable.value + float(replica + 1))

        strategy.run(own)

    run()
    assert variable.value is distributed
    assert optimizer._distribution_strategy is strategy
    assert [copy.numpy()[0] for copy in distributed.values] == [2.0, 3.0]
