"""Tasks with models in common styles, for images [6, 6, 1]."""

import keras
import numpy as np
import tensorflow as tf

import ddl
from tests.training.test_trainer import DATA

L = keras.layers


def dense(units, **kwargs):
    return L.Dense(units, **kwargs)


def norm():
    return L.BatchNormalization()


def sequential():
    return keras.Sequential(
        [keras.Input((6, 6, 1)), L.Flatten(), dense(8), norm(), L.Dropout(0.2), dense(2)]
    )


def functional():
    inputs = keras.Input((6, 6, 1))
    shared = dense(36)  # called twice
    hidden = shared(shared(L.Flatten()(inputs)))
    return keras.Model(inputs, dense(2)(norm()(hidden)))


@keras.saving.register_keras_serializable("styles")
class Attributes(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.flatten, self.hidden, self.norm, self.head = L.Flatten(), dense(8), norm(), dense(2)

    def call(self, images, training=False):
        return self.head(self.norm(self.hidden(self.flatten(images)), training=training))


@keras.saving.register_keras_serializable("styles")
class Containers(keras.Model):
    """A model with layers and weights in lists, tuples, dicts, nested and private ones."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.blocks = [dense(8), [norm(), {"hidden": dense(8)}]]
        self._private = {"tuple": (dense(8), L.Dropout(0.2)), "head": dense(2)}
        self.scales = [
            self.add_weight(shape=(8,), initializer="ones", name="scale") for _ in range(2)
        ]
        self.counts = {"calls": self.add_weight(shape=(), initializer="zeros", trainable=False)}

    def call(self, images, training=False):
        first, (normalize, named) = self.blocks
        x = normalize(first(tf.reshape(images, [-1, 36])), training=training)
        x = named["hidden"](x * self.scales[0])
        again, drop = self._private["tuple"]
        if training:
            self.counts["calls"].assign_add(1.0)
        return self._private["head"](drop(again(x), training=training) * self.scales[1])


def lists_within_functional():
    inputs = keras.Input((6, 6, 1))
    return keras.Model(inputs, Containers()(sequential_images()(inputs)))


def sequential_images():
    return keras.Sequential([keras.Input((6, 6, 1)), L.Conv2D(1, 3, padding="same"), norm()])


def stacked_cells():
    cells = [keras.layers.LSTMCell(4), keras.layers.GRUCell(3)]
    return keras.Sequential([keras.Input((6, 6, 1)), L.Reshape((6, 6)), L.RNN(cells), dense(2)])


def attention():
    inputs = keras.Input((6, 6, 1))
    rows = L.Reshape((6, 6))(inputs)
    attended = L.LayerNormalization()(L.MultiHeadAttention(2, 3, dropout=0.1)(rows, rows))
    return keras.Model(inputs, dense(2)(L.Flatten()(attended)))


def preprocessing():
    statistics = L.Normalization(axis=None)
    statistics.adapt(np.asarray(DATA["image"], np.float32))
    return keras.Sequential([keras.Input((6, 6, 1)), statistics, L.Flatten(), dense(2)])


def partly_frozen():
    model = functional()
    model.layers[2].trainable = False
    return model


def application():
    inputs = keras.Input((6, 6, 1))
    images = L.Resizing(32, 32)(L.Concatenate()([inputs] * 3))
    whole = keras.applications.MobileNet((32, 32, 3), 0.25, weights=None, include_top=False)
    base = keras.Model(whole.input, whole.get_layer("conv_pw_2_relu").output)  # few to trace
    base.trainable = False
    return keras.Model(inputs, dense(2)(L.GlobalAveragePooling2D()(base(images, training=False))))


def wrapped():
    layers = [L.SpectralNormalization(dense(8)), L.UnitNormalization(), dense(2)]
    return keras.Sequential([keras.Input((6, 6, 1)), L.Flatten(), *layers])


MODELS = {
    make.__name__: make
    for make in (
        *(sequential, functional, Attributes, Containers, lists_within_functional, stacked_cells),
        *(attention, preprocessing, partly_frozen, application, wrapped),
    )
}


class OwnLayers(ddl.Classification):
    """A task with its own layers and variable besides its model."""

    def __init__(self, model):
        super().__init__(model)
        self.layers = [{"norm": L.BatchNormalization(center=False, scale=False)}]
        self.seen = {"batches": tf.Variable(0, trainable=False, dtype=tf.int64)}

    def per_example(self, features, training):
        normalized = self.layers[0]["norm"](
            tf.cast(features["image"], tf.float32), training=training
        )
        if training:
            self.seen["batches"].assign_add(1, read_value=False)
        return super().per_example({**features, "image": normalized}, training)


def task(style):
    model = MODELS["Attributes" if style == "own_layers" else style]()
    model(tf.zeros([1, 6, 6, 1]))
    return OwnLayers(model) if style == "own_layers" else ddl.Classification(model)


STYLES = [*MODELS, "own_layers"]
