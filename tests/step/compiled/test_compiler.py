"""When pieces are compiled, and what is said about a model that XLA cannot compile."""

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
from ddl.step.compiled import compiler as compilers
from ddl.step.compiled.compiler import Compiler
from ddl.step.compiled.one_replica import alone
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


class Cut(keras.layers.Layer):
    """A shape that depends on values, which XLA must know."""

    def call(self, images):
        rows = tf.cast(tf.reduce_max(images), tf.int32)
        return tf.reshape(tf.slice(images, [0, 0, 0, 0], [-1, 4 * rows, 4, 1]), [-1, 4, 4, 1])

    def compute_output_shape(self, input_shape):
        return input_shape


class Summed(keras.layers.Layer):
    def call(self, images):
        context = tf.distribute.get_replica_context()
        return images if context is None else context.all_reduce("SUM", images)


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


class Noisy(keras.layers.Layer):
    """Draws the same in each update."""

    def call(self, x):
        return x + tf.random.stateless_normal(tf.shape(x), [1, 2])


def normalization():
    return keras.layers.BatchNormalization(name="shared_moments")


@pytest.mark.parametrize(
    ("layer", "replicas", "words"),
    [
        (lambda: Warped(name="warp"), 1, ["warp", "/ImageProjectiveTransformV3", "no kernel"]),
        (lambda: Cut(name="cut"), 1, ["cut", "/Slice"]),
        (lambda: Noisy(name="drops"), 1, ["drops", "other random", "keras.random"]),
        (normalization, 2, ["shared_moments", "sums over the replicas"]),
        (lambda: Summed(name="summed"), 2, ["across replicas"]),
    ],
    ids=["operation", "shape", "draws", "normalization", "collective"],
)
def test_a_layer_that_cannot_be_compiled_is_named_before_training(layer, replicas, words):
    made = trainer(layer, make_strategy("mirrored", 2) if replicas == 2 else None)
    with pytest.raises(ConfigError) as raised:
        made.trace()
    for word in ["--jit_compile=on", "training", *words, "--jit_compile=auto"]:
        assert word in str(raised.value)
    assert made.step == 0


def test_dropout_of_keras_is_compiled_and_draws_the_same():
    compiled, plain = (
        trainer(lambda: keras.layers.Dropout(0.5), jit_compile=jit_compile).train(2)["loss"]
        for jit_compile in ("on", "off")
    )
    assert compiled == pytest.approx(plain, rel=1e-6)


def test_auto_goes_without_and_says_so(monkeypatch, caplog):
    monkeypatch.setattr(device_path, "CPU", dataclasses.replace(device_path.CPU, compiles=True))
    made = trainer(lambda: Warped(name="warp"), jit_compile="auto", eval_data=DATA)
    loss = made.train(2)["loss"]
    made.evaluate()
    texts = [record.getMessage() for record in caplog.records]
    said = [text for text in texts if "ImageProjectiveTransformV3" in text]
    assert [text.split()[0] for text in said] == ["Training", "Evaluation"]
    assert loss == trainer(lambda: Warped(name="warp"), jit_compile="off").train(2)["loss"]


def test_compiles_on_gpus_alone_unless_asked(monkeypatch):
    strategy = make_strategy("one_device", 1)
    assert not Compiler("auto", strategy, "training").is_on
    assert Compiler("on", strategy, "training").is_on
    with device_path.taking(device_path.GPU):
        assert Compiler("auto", strategy, "training").is_on
        assert not Compiler("off", strategy, "training").is_on
        monkeypatch.setattr(compilers, "is_op_determinism_enabled", lambda: True)
        assert not Compiler("auto", strategy, "training").is_on
        assert Compiler("on", strategy, "training").is_on
    with device_path.taking(device_path.TPU):
        assert not Compiler("on", strategy, "training").is_on


def test_weights_on_other_devices_are_refused():
    strategy = make_strategy("central_storage", 2)
    with pytest.raises(ConfigError, match="CentralStorageStrategy, which keeps them elsewhere"):
        Compiler("on", strategy, "training")
    with device_path.taking(device_path.GPU):
        assert not Compiler("auto", strategy, "training").is_on


def test_another_choice_is_refused():
    with pytest.raises(ConfigError, match=r"Trainer.jit_compile must be .*got True"):
        trainer(keras.layers.Flatten, jit_compile=True)


def pieces(made):
    """Names of the compiled functions that an update calls."""
    loop = made._runner.loop
    made.trace()
    graph = loop._concrete(made.state).graph
    functions = graph.as_graph_def().library.function
    return [f.signature.name for f in functions if f.attr["_XlaMustCompile"].b]


def test_pieces():
    """The loop's condition, and what a replica that is alone does, or else four parts of it.

    These are forward and backward, update, average; and the sums, once for all replicas.
    """
    arguments = {"clip_norm": 1.0, "weight_average": ddl.ExponentialMovingAverage()}
    assert len(pieces(trainer(keras.layers.Flatten, **arguments))) == 1 + 1
    two = trainer(keras.layers.Flatten, make_strategy("mirrored", 2), **arguments)
    assert len(pieces(two)) == 1 + 3 * 2 + 1
    assert not pieces(trainer(keras.layers.Flatten, jit_compile="auto"))


def test_sparse_gradients_stay_sparse():
    strategy = make_strategy("one_device", 1)
    with strategy.scope():
        layers = [keras.layers.Embedding(50, 2), keras.layers.Flatten()]
        model = keras.Sequential([keras.Input((2,), dtype="int64"), *layers])
        made = ddl.Trainer(
            ddl.Classification(model),
            keras.optimizers.SGD(0.1),
            (np.array([[1, 2], [3, 1]] * 4), np.arange(8) % 4),
            global_batch_size=4,
            jit_compile="on",
        )
    # The update is none of them: XLA would compile it for each number of rows.
    assert len(pieces(made)) == 1 + 2
    before = model.weights[0].numpy()
    made.train(1)
    changed = (model.weights[0].numpy() != before).any(axis=1)
    assert changed.sum() == changed[1:4].sum() == 3


def test_an_optimizer_that_sums_over_replicas_is_refused():
    class Summing(keras.optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            strategy = tf.distribute.get_strategy()
            total = strategy.extended.reduce_to("SUM", gradient, variable)
            super().update_step(total, variable, learning_rate)

    strategy = make_strategy("mirrored", 2)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4, 4, 1)), keras.layers.Flatten()])
        model.add(keras.layers.Dense(2))
        made = ddl.Trainer(
            ddl.Classification(model), Summing(0.1), DATA, global_batch_size=4, jit_compile="on"
        )
    with pytest.raises(ConfigError, match="must not sum over the replicas"):
        made.trace()


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
            with alone([variable], [optimizer]):
                assert tf.distribute.get_strategy().num_replicas_in_sync == 1
                assert optimizer._distribution_strategy.num_replicas_in_sync == 1
                assert variable.value is distributed.values[replica]
                variable.assign(variable.value + float(replica + 1))

        strategy.run(own)

    run()
    assert variable.value is distributed
    assert optimizer._distribution_strategy is strategy
    assert [copy.numpy()[0] for copy in distributed.values] == [2.0, 3.0]
