"""Keras's layers that draw random numbers, called with all rows of a batch and with parts of it."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import ddl
from ddl.errors import ConfigError
from ddl.precision import set_precision
from tests.by_position import ROWS, whole_and_parts
from tests.conftest import make_strategy

_RANDOM = np.random.default_rng(0)
IMAGES = _RANDOM.uniform(0, 255, (ROWS, 12, 12, 3)).astype("f4")
STEPS = _RANDOM.normal(size=(ROWS, 5, 4)).astype("f4")
FRAMES = _RANDOM.normal(size=(ROWS, 4, 5, 5, 2)).astype("f4")

BOTH = {"dropout": 0.4, "recurrent_dropout": 0.3}
COLORS = {f"{name}_factor": 0.4 for name in ("brightness", "contrast", "saturation", "hue")}


class Itself(layers.Layer):
    """Attention of a sequence to itself."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def call(self, x, training=False):
        if isinstance(self.layer, layers.Attention):
            return self.layer([x, x], training=training)
        return self.layer(x, x, training=training)


def jitter(x):
    return x + keras.random.normal(keras.ops.shape(x))


# The bits agree but for rounding: kernels of matrix products and of sines depend on the rows.
LAYERS = {
    "RandomFlip": (layers.RandomFlip, IMAGES),
    "RandomTranslation": (lambda: layers.RandomTranslation(0.3, 0.3), IMAGES),
    "RandomZoom": (lambda: layers.RandomZoom(0.3, 0.3), IMAGES),
    "RandomRotation": (lambda: layers.RandomRotation(0.3), IMAGES),
    "RandomContrast": (lambda: layers.RandomContrast(0.5), IMAGES),
    "RandomBrightness": (lambda: layers.RandomBrightness(0.5), IMAGES),
    "RandomCrop": (lambda: layers.RandomCrop(7, 7), IMAGES),
    "RandomErasing": (lambda: layers.RandomErasing(1.0), IMAGES),
    "RandomColorJitter": (lambda: layers.RandomColorJitter(**COLORS), IMAGES),
    "RandomHue": (lambda: layers.RandomHue(0.5), IMAGES),
    "RandomSaturation": (lambda: layers.RandomSaturation(0.5), IMAGES),
    "RandomSharpness": (lambda: layers.RandomSharpness(0.5), IMAGES),
    "RandomShear": (lambda: layers.RandomShear(0.3, 0.3), IMAGES),
    "RandomPerspective": (lambda: layers.RandomPerspective(1.0, 0.5), IMAGES),
    "RandomGaussianBlur": (lambda: layers.RandomGaussianBlur(factor=1.0), IMAGES),
    "RandomPosterization": (lambda: layers.RandomPosterization(4), IMAGES),
    "RandomInvert": (lambda: layers.RandomInvert(0.5), IMAGES),
    "RandomGrayscale": (lambda: layers.RandomGrayscale(0.5), IMAGES),
    "Solarization": (lambda: layers.Solarization(0.3, 0.3), IMAGES),
    "Pipeline": (lambda: layers.Pipeline([layers.RandomFlip(), layers.RandomHue(0.5)]), IMAGES),
    "Dropout": (lambda: layers.Dropout(0.4), STEPS),
    "Dropout of all steps": (lambda: layers.Dropout(0.4, noise_shape=(None, 1, None)), STEPS),
    "Dropout of all rows": (lambda: layers.Dropout(0.4, noise_shape=(1, 5, 4)), STEPS),
    "SpatialDropout1D": (lambda: layers.SpatialDropout1D(0.4), STEPS),
    "GaussianNoise": (lambda: layers.GaussianNoise(0.4), STEPS),
    "GaussianDropout": (lambda: layers.GaussianDropout(0.4), STEPS),
    "AlphaDropout": (lambda: layers.AlphaDropout(0.4), STEPS),
    "LSTM": (lambda: layers.LSTM(3, **BOTH), STEPS),
    "GRU": (lambda: layers.GRU(3, **BOTH), STEPS),
    "SimpleRNN": (lambda: layers.SimpleRNN(3, **BOTH), STEPS),
    "Bidirectional": (lambda: layers.Bidirectional(layers.LSTM(3, **BOTH)), STEPS),
    "RNN": (lambda: layers.RNN([layers.LSTMCell(3, **BOTH), layers.GRUCell(3, **BOTH)]), STEPS),
    "ConvLSTM2D": (lambda: layers.ConvLSTM2D(2, 3, **BOTH), FRAMES),
    "Attention": (lambda: Itself(layers.Attention(dropout=0.4)), STEPS),
    "AdditiveAttention": (lambda: Itself(layers.AdditiveAttention(dropout=0.4)), STEPS),
    "MultiHeadAttention": (lambda: Itself(layers.MultiHeadAttention(2, 3, dropout=0.4)), STEPS),
    "TimeDistributed": (lambda: layers.TimeDistributed(layers.Dropout(0.4)), STEPS),
    "Lambda": (lambda: layers.Lambda(jitter), STEPS),
    "RandomShift": (lambda: ddl.layers.RandomShift(2, 1), IMAGES),
    "RandomResizedCrop": (lambda: ddl.layers.RandomResizedCrop(6, 5), IMAGES),
}


def called(layer, inputs):
    """Returns a call of a layer in training, on its rows of the inputs."""

    def call(first, rows):
        return layer(tf.ensure_shape(inputs[first : first + rows], (rows, *inputs.shape[1:])))

    inputs = tf.constant(inputs)
    untrained = np.asarray(layer(inputs, training=False))
    layer = functools.partial(layer, training=True)
    return call, untrained


@pytest.mark.parametrize("name", LAYERS)
def test_parts_of_a_batch_draw_the_numbers_of_the_whole(name):
    keras.utils.set_random_seed(1)
    make, inputs = LAYERS[name]
    call, untrained = called(make(), inputs)
    (whole,), (parts,) = whole_and_parts(call)
    np.testing.assert_allclose(parts, whole, rtol=0, atol=1e-6 * np.abs(whole).max())
    assert whole.shape != untrained.shape or not np.allclose(whole, untrained)


@pytest.mark.parametrize("name", ["Equalization", "RandAugment", "AugMix", "MixUp"])
def test_a_trainer_refuses_layers_of_whole_batches_by_name(name):
    model = keras.Sequential([keras.Input((6, 6, 3)), layers.Flatten(), layers.Dense(2)])
    task = ddl.Classification(model, augmentations=[getattr(layers, name)()])
    data = {"image": IMAGES[:, :6, :6], "label": np.zeros(ROWS, int)}
    with pytest.raises(ConfigError, match=rf"\({name}\) computes a row from all rows"):
        ddl.Trainer(task, keras.optimizers.SGD(), data, global_batch_size=4)


def combined() -> ddl.Classification:
    """Images, then their rows as a sequence."""
    images = [layers.RandomFlip(), layers.RandomTranslation(0.3, 0.3), layers.Reshape((6, 12))]
    steps = [layers.GaussianNoise(0.1), layers.LSTM(4, return_sequences=True, **BOTH)]
    steps += [Itself(layers.MultiHeadAttention(2, 3, dropout=0.4)), layers.Flatten()]
    steps += [layers.Lambda(jitter, output_shape=(24,)), layers.Dense(3)]
    augmentations = [ddl.layers.RandomShift(1, 1), ddl.layers.RandomResizedCrop(6, 6)]
    model = keras.Sequential([keras.Input((6, 6, 2)), *images, *steps])
    return ddl.Classification(model, augmentations=augmentations, mixing=ddl.layers.Mixup(0.4))


def trained(replicas: int, microbatches: int) -> list[np.ndarray]:
    """Returns the weights after three updates, and the losses."""
    set_precision("float64")
    keras.utils.set_random_seed(2)
    images = np.random.default_rng(4).normal(size=(20, 6, 6, 2))
    with make_strategy("mirrored" if replicas > 1 else "one_device", replicas).scope():
        options = {"global_batch_size": 8, "accumulation_steps": microbatches}
        data = images, np.arange(20) % 3
        trainer = ddl.Trainer(combined(), keras.optimizers.SGD(0.01), data, **options)
    losses = [trainer.train(1)["loss"] for _ in range(3)]
    return [np.array(losses), *trainer.model.get_weights()]


def test_a_model_of_many_trains_the_same_on_two_devices():
    for ours, one in zip(trained(2, 2), trained(1, 1), strict=True):
        np.testing.assert_allclose(ours, one, rtol=0, atol=1e-10)
