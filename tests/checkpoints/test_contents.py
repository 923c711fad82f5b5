"""What checkpoints hold, for models in every style: whatever is lost shows in figures and bits."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.checkpoints.checkpoints import Checkpoints
from ddl.errors import ConfigError, ModelDirectoryError
from ddl.tasks.parts import layers_of
from tests.conftest import make_strategy, save
from tests.training.test_trainer import DATA

L = keras.layers


class Containers(keras.Model):
    """A model with layers and unnamed weights in lists, tuples, dicts, nested and private ones."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.blocks = [L.Dense(8), [L.BatchNormalization(), {"hidden": L.Dense(8)}]]
        self._private = {"tuple": (L.Dense(8), L.Dropout(0.2)), "head": L.Dense(2)}
        self.scales = [self.add_weight(shape=(8,), initializer="ones") for _ in range(2)]
        self.calls = tf.Variable(0.0, trainable=False)  # which Keras does not track
        self.mean = keras.metrics.Mean()

    def call(self, images, training=False):
        first, (normalize, named) = self.blocks
        x = normalize(first(tf.reshape(images, [-1, 36])), training=training)
        x = named["hidden"](x * self.scales[0])
        again, drop = self._private["tuple"]
        return self._private["head"](drop(again(x), training=training) * self.scales[1])


class OwnLayers(ddl.Classification):
    """A task with its own layers, metric and variables beside its model."""

    def __init__(self, model):
        super().__init__(model)
        self.layers = [{"norm": L.BatchNormalization(center=False, scale=False)}]
        self.seen = {"batches": tf.Variable(0, trainable=False, dtype=tf.int64)}

    def per_example(self, features, training):
        images = tf.cast(features["image"], tf.float32)
        images = self.layers[0]["norm"](images, training=training)
        if training:
            self.seen["batches"].assign_add(1, read_value=False)
        return super().per_example({**features, "image": images}, training)


def frozen_and_adapted():
    statistics = L.Normalization(axis=None)
    statistics.adapt(np.asarray(DATA["image"], np.float32))
    inputs = keras.Input((6, 6, 1))
    hidden = L.Flatten()(statistics(inputs))
    frozen = L.Dense(36)
    hidden = frozen(frozen(hidden))  # called twice
    frozen.trainable = False
    return keras.Model(inputs, L.Dense(2)(hidden))


def deep(*names):
    stack = [L.Dense(4, name=name) for name in names]
    return keras.Sequential([keras.Input((6, 6, 1)), L.Flatten(), *stack])


def built(model):
    model(tf.zeros([1, 6, 6, 1]))
    return model


def trainer_of(model, seed, replicas=1, task=ddl.Classification, optimizer=None):
    keras.utils.set_random_seed(seed)
    strategy = make_strategy("mirrored" if replicas > 1 else "one_device", replicas)
    with strategy.scope():
        rule = keras.optimizers.SGD(0.001, momentum=0.9) if optimizer is None else optimizer()
        settings = {"global_batch_size": 32, "eval_data": DATA, "strategy": strategy}
        return ddl.Trainer(task(model()), rule, DATA, **settings)


def variables(trainer):
    layers = [v for layer in layers_of(trainer.task) for v in layer.variables]
    return [np.asarray(v) for v in [*layers, *trainer.optimizer.variables]]


def assert_equal(values, expected):
    for value, reference in zip(values, expected, strict=True):
        np.testing.assert_array_equal(value, reference)


@pytest.mark.parametrize(
    ("model", "task", "replicas"),
    [
        (lambda: built(Containers()), ddl.Classification, 2),
        (frozen_and_adapted, OwnLayers, 1),
    ],
    ids=["containers", "own layers"],
)
def test_a_trainer_of_another_seed_takes_over_all_that_was_saved(tmp_path, model, task, replicas):
    straight = trainer_of(model, 1, replicas, task)
    straight.train(3)
    if isinstance(straight.model, Containers):
        straight.model.calls.assign(3.0)
        straight.model.mean.update_state(5.0)
    save(tmp_path, straight)
    saved, figures = variables(straight), straight.evaluate()
    straight.train(3)

    other = trainer_of(model, 2, replicas, task)
    Checkpoints(tmp_path, other).restore_model()
    assert other.evaluate() == figures
    Checkpoints(tmp_path, other).restore_latest()
    assert_equal(variables(other), saved)
    if isinstance(other.model, Containers):
        assert other.model.calls.numpy() == 3.0
        assert float(other.model.mean.result()) == 5.0
    other.train(3)
    assert_equal(variables(other), variables(straight))


@pytest.fixture(scope="module")
def of_two(tmp_path_factory):
    """The folder of a checkpoint of two layers of one shape."""
    folder = tmp_path_factory.mktemp("two")
    save(folder, trainer_of(lambda: deep("first", "second", "third"), 1))
    return folder


def adam():
    return keras.optimizers.Adam(0.01)


@pytest.mark.parametrize(
    ("names", "optimizer", "message"),
    [
        (["first", "second"], None, r"model/0004 is \S*third/kernel .*, expected nothing"),
        (["first", "third", "second"], None, r"is \S*second/kernel .*, expected \S*third/kernel"),
        (["first", "second", "third"], adam, r"_momentum .*, expected \S*_momentum .*"),
    ],
    ids=["fewer", "swapped", "optimizer"],
)
def test_another_model_or_optimizer_is_refused_before_anything_is_assigned(
    of_two, names, optimizer, message
):
    other = trainer_of(lambda: deep(*names), 2, optimizer=optimizer)
    before = variables(other)
    with pytest.raises(ModelDirectoryError, match=rf"step-0 cannot be restored: .*{message}"):
        Checkpoints(of_two, other).restore_latest()
    assert_equal(variables(other), before)
    if optimizer is not None:  # no part of an evaluation
        Checkpoints(of_two, other).restore_model()
        assert not np.array_equal(variables(other)[0], before[0])


def test_models_within_a_model_are_told_apart_by_their_names(tmp_path):
    def inner(name):
        x = keras.Input((36,))
        return keras.Model(x, L.Dense(36, name="same")(x), name=name)

    def outer(*names):
        stack = [L.Flatten(), *map(inner, names), L.Dense(2)]
        return keras.Sequential([keras.Input((6, 6, 1)), *stack])

    save(tmp_path, trainer_of(lambda: outer("one", "two"), 1))
    other = Checkpoints(tmp_path, trainer_of(lambda: outer("two", "one"), 1))
    with pytest.raises(ModelDirectoryError, match="is one/same/kernel .* expected two/same/kernel"):
        other.restore_latest()


class ReadsElsewhere(ddl.Classification):
    """Only reads the variable; a loss that writes it is refused before training."""

    def per_example(self, features, training):
        output = super().per_example(features, training)
        return output._replace(loss=output.loss * _FACTOR[0]) if training else output


_FACTOR = []


def test_a_variable_that_belongs_to_nobody_is_refused(tmp_path):
    _FACTOR.append(tf.Variable(1.0, trainable=False, name="elsewhere"))
    trainer = trainer_of(lambda: deep("first"), 1, task=ReadsElsewhere)
    trainer.trace()
    with pytest.raises(ConfigError, match="uses the variables elsewhere, which no checkpoint"):
        save(tmp_path, trainer)
    assert not list(tmp_path.iterdir())
