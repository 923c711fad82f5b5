"""Every layer class of Keras in a small branch, and one training of many branches.

    python -m tests.training.layer_cases [NAME]...

prints a digest of each branch as JSON. tests/training/test_all_layers.py compares processes.

A branch ends in logits of its own, and the loss is the sum over the branches: the weights of a
branch depend on that branch alone, so a digest of them names the layer that differs.
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

import ddl
from ddl.training.checks.row_independence import RowIndependence

layers = keras.layers
_RANDOM = np.random.default_rng(0)
ROWS, STEPS = 96, 12
_TOGETHER = 35  # branches of a model: few traces, and none that takes too much memory
INPUTS = {
    "vector": _RANDOM.normal(size=[ROWS, 256]).astype("f4"),
    "sequence": _RANDOM.normal(size=[ROWS, 16, 8]).astype("f4"),
    "image": _RANDOM.normal(size=[ROWS, 12, 12, 4]).astype("f4"),
    "volume": _RANDOM.normal(size=[ROWS, 6, 6, 6, 3]).astype("f4"),
    "rgb": _RANDOM.uniform(size=[ROWS, 12, 12, 3]).astype("f4"),
    "tokens": _RANDOM.integers(0, 20, size=[ROWS, 12]),
}
LABELS = _RANDOM.integers(0, 5, size=[ROWS])


class Case(NamedTuple):
    """A branch with a layer.

    Attributes:
      given: A key of `INPUTS`.
      layer: Takes the input, through a dense layer if it is a tensor of floats that is no picture.
      others: Further classes that the branch contains.
    """

    given: str
    layer: Callable[[Any], Any]
    others: tuple[str, ...] = ()


def _both(make: Callable[[], Any]) -> Callable[[Any], Any]:
    """A layer of two inputs."""
    return lambda x: make()([x, layers.Dense(x.shape[-1], "tanh")(x)])


def _picture(name: str, *arguments: Any, **named: Any) -> Case:
    return Case("rgb", lambda x: getattr(layers, name)(*arguments, **named)(x))


def _strings(x: Any) -> Any:
    return layers.Lambda(tf.strings.as_string, output_shape=x.shape[1:], dtype="string")(x)


def _text(x: Any) -> Any:
    def joined(tokens: Any) -> Any:
        words = tf.strings.as_string(tokens)
        return tf.strings.reduce_join(words, axis=-1, keepdims=True, separator=" ")

    text = layers.Lambda(joined, output_shape=(1,), dtype="string")(x)
    vocabulary = [str(number) for number in range(15)]
    return layers.TextVectorization(vocabulary=vocabulary, output_sequence_length=12)(text)


def _stacked(x: Any) -> Any:
    cells = [layers.LSTMCell(8), layers.GRUCell(8), layers.SimpleRNNCell(8)]
    return layers.RNN(layers.StackedRNNCells(cells))(x)


def _nested(x: Any) -> Any:
    """Volumes of volumes, for ConvLSTM3D."""
    return layers.ConvLSTM3D(2, 2)(layers.Reshape((2, 3, 6, 6, 3))(x))


_UNIT = {"value_range": (0, 1)}

CASES: dict[str, Case] = {
    "Activation": Case("sequence", lambda x: layers.Activation("gelu")(x)),
    "ActivityRegularization": Case("sequence", lambda x: layers.ActivityRegularization(l2=0.1)(x)),
    "AdaptiveAveragePooling1D": Case("sequence", lambda x: layers.AdaptiveAveragePooling1D(5)(x)),
    "AdaptiveAveragePooling2D": Case("image", lambda x: layers.AdaptiveAveragePooling2D(5)(x)),
    "AdaptiveAveragePooling3D": Case("volume", lambda x: layers.AdaptiveAveragePooling3D(4)(x)),
    "AdaptiveMaxPooling1D": Case("sequence", lambda x: layers.AdaptiveMaxPooling1D(5)(x)),
    "AdaptiveMaxPooling2D": Case("image", lambda x: layers.AdaptiveMaxPooling2D(5)(x)),
    "AdaptiveMaxPooling3D": Case("volume", lambda x: layers.AdaptiveMaxPooling3D(4)(x)),
    "Add": Case("sequence", _both(layers.Add)),
    "AdditiveAttention": Case("sequence", _both(layers.AdditiveAttention)),
    "AlphaDropout": Case("sequence", lambda x: layers.AlphaDropout(0.3)(x)),
    "Attention": Case("sequence", _both(lambda: layers.Attention(use_scale=True, dropout=0.1))),
    "AutoContrast": _picture("AutoContrast", **_UNIT),
    "Average": Case("sequence", _both(layers.Average)),
    "AveragePooling1D": Case("sequence", lambda x: layers.AveragePooling1D(3)(x)),
    "AveragePooling2D": Case("image", lambda x: layers.AveragePooling2D(3, 2)(x)),
    "AveragePooling3D": Case("volume", lambda x: layers.AveragePooling3D(2)(x)),
    "BatchNormalization": Case("image", lambda x: layers.BatchNormalization(synchronized=True)(x)),
    "Bidirectional": Case("sequence", lambda x: layers.Bidirectional(layers.GRU(8))(x)),
    "CategoryEncoding": Case("tokens", lambda x: layers.CategoryEncoding(20)(x)),
    "CenterCrop": Case("image", lambda x: layers.CenterCrop(8, 8)(x)),
    "Concatenate": Case("sequence", _both(layers.Concatenate)),
    "ContrastLimitedAdaptiveHistogramEqualization": _picture(
        "ContrastLimitedAdaptiveHistogramEqualization", tile_grid_size=(2, 2), **_UNIT
    ),
    "Conv1D": Case("sequence", lambda x: layers.Conv1D(16, 3, activation="relu")(x)),
    "Conv1DTranspose": Case("sequence", lambda x: layers.Conv1DTranspose(8, 3, strides=2)(x)),
    "Conv2D": Case("image", lambda x: layers.Conv2D(16, 3, padding="same", activation="relu")(x)),
    "Conv2DTranspose": Case("image", lambda x: layers.Conv2DTranspose(8, 3, strides=2)(x)),
    "Conv3D": Case("volume", lambda x: layers.Conv3D(8, 3)(x)),
    "Conv3DTranspose": Case("volume", lambda x: layers.Conv3DTranspose(4, 2, strides=2)(x)),
    "ConvLSTM1D": Case("image", lambda x: layers.ConvLSTM1D(4, 3)(x)),
    "ConvLSTM2D": Case("volume", lambda x: layers.ConvLSTM2D(4, 3)(x)),
    "ConvLSTM3D": Case("volume", _nested),
    "Cropping1D": Case("sequence", lambda x: layers.Cropping1D(2)(x)),
    "Cropping2D": Case("image", lambda x: layers.Cropping2D(2)(x)),
    "Cropping3D": Case("volume", lambda x: layers.Cropping3D(1)(x)),
    "Dense": Case("sequence", lambda x: layers.Dense(32, "gelu")(x)),
    "DepthwiseConv1D": Case("sequence", lambda x: layers.DepthwiseConv1D(3)(x)),
    "DepthwiseConv2D": Case("image", lambda x: layers.DepthwiseConv2D(3, depth_multiplier=2)(x)),
    "Discretization": Case("rgb", lambda x: layers.Discretization([0.2, 0.4, 0.7])(x)),
    "Dot": Case("sequence", _both(lambda: layers.Dot(2))),
    "Dropout": Case("sequence", lambda x: layers.Dropout(0.3)(x)),
    "ELU": Case("sequence", lambda x: layers.ELU()(x)),
    "EinsumDense": Case("sequence", lambda x: layers.EinsumDense("btc,cd->btd", (16, 24))(x)),
    "Embedding": Case("tokens", lambda x: layers.Embedding(20, 16)(x)),
    "Equalization": _picture("Equalization", **_UNIT),
    "Flatten": Case("image", lambda x: layers.Flatten()(x)),
    "GRU": Case("sequence", lambda x: layers.GRU(16, dropout=0.1)(x)),
    "GaussianDropout": Case("sequence", lambda x: layers.GaussianDropout(0.3)(x)),
    "GaussianNoise": Case("sequence", lambda x: layers.GaussianNoise(0.3)(x)),
    "GlobalAveragePooling1D": Case("sequence", lambda x: layers.GlobalAveragePooling1D()(x)),
    "GlobalAveragePooling2D": Case("image", lambda x: layers.GlobalAveragePooling2D()(x)),
    "GlobalAveragePooling3D": Case("volume", lambda x: layers.GlobalAveragePooling3D()(x)),
    "GlobalMaxPooling1D": Case("sequence", lambda x: layers.GlobalMaxPooling1D()(x)),
    "GlobalMaxPooling2D": Case("image", lambda x: layers.GlobalMaxPooling2D()(x)),
    "GlobalMaxPooling3D": Case("volume", lambda x: layers.GlobalMaxPooling3D()(x)),
    "GroupNormalization": Case("image", lambda x: layers.GroupNormalization(2)(x)),
    "GroupedQueryAttention": Case(
        "sequence", lambda x: layers.GroupQueryAttention(8, 4, 2, dropout=0.1)(x, x)
    ),
    "HashedCrossing": Case(
        "tokens", lambda x: layers.HashedCrossing(20)((x[:, 0], x[:, 1]))[:, None]
    ),
    "Hashing": Case("tokens", lambda x: layers.Hashing(20)(x)),
    "Identity": Case("sequence", lambda x: layers.Identity()(x)),
    "IntegerLookup": Case("tokens", lambda x: layers.IntegerLookup(vocabulary=[*range(15)])(x)),
    "LSTM": Case("sequence", lambda x: layers.LSTM(16, dropout=0.1)(x)),
    "Lambda": Case("sequence", lambda x: layers.Lambda(lambda x: x * tf.sin(x))(x)),
    "LayerNormalization": Case("sequence", lambda x: layers.LayerNormalization()(x)),
    "LeakyReLU": Case("sequence", lambda x: layers.LeakyReLU()(x)),
    "Masking": Case("sequence", lambda x: layers.SimpleRNN(8)(layers.Masking()(x))),
    "MaxPooling1D": Case("sequence", lambda x: layers.MaxPooling1D(3, 1)(x)),
    "MaxPooling2D": Case("image", lambda x: layers.MaxPooling2D(3, 2)(x)),
    "MaxPooling3D": Case("volume", lambda x: layers.MaxPooling3D(2, 1)(x)),
    "Maximum": Case("sequence", _both(layers.Maximum)),
    "MelSpectrogram": Case(
        "vector",
        lambda x: layers.MelSpectrogram(64, 32, num_mel_bins=8, sampling_rate=256, max_freq=128)(x),
    ),
    "Minimum": Case("sequence", _both(layers.Minimum)),
    "MultiHeadAttention": Case(
        "sequence", lambda x: layers.MultiHeadAttention(2, 8, dropout=0.1)(x, x)
    ),
    "Multiply": Case("sequence", _both(layers.Multiply)),
    "Normalization": Case("sequence", lambda x: layers.Normalization(mean=0.1, variance=2.0)(x)),
    "PReLU": Case("sequence", lambda x: layers.PReLU()(x)),
    "Permute": Case("sequence", lambda x: layers.Permute((2, 1))(x)),
    "Pipeline": Case(
        "rgb", lambda x: layers.Pipeline([layers.RandomFlip(), layers.RandomRotation(0.1)])(x)
    ),
    "RMSNormalization": Case("sequence", lambda x: layers.RMSNormalization()(x)),
    "RNN": Case("sequence", _stacked, ("StackedRNNCells", "LSTMCell", "GRUCell", "SimpleRNNCell")),
    "RandAugment": _picture("RandAugment", **_UNIT),
    "RandomBrightness": _picture("RandomBrightness", 0.3, **_UNIT),
    "RandomColorDegeneration": _picture("RandomColorDegeneration", 0.5, **_UNIT),
    "RandomColorJitter": _picture("RandomColorJitter", **_UNIT, brightness_factor=0.2),
    "RandomContrast": _picture("RandomContrast", 0.3, **_UNIT),
    "RandomCrop": Case(  # outside of training it may leave small pictures as they are
        "rgb", lambda x: layers.GlobalAveragePooling2D()(layers.RandomCrop(8, 8)(x))
    ),
    "RandomElasticTransform": _picture("RandomElasticTransform", **_UNIT),
    "RandomErasing": _picture("RandomErasing", **_UNIT),
    "RandomFlip": _picture("RandomFlip"),
    "RandomGaussianBlur": _picture("RandomGaussianBlur", **_UNIT),
    "RandomGrayscale": _picture("RandomGrayscale"),
    "RandomHue": _picture("RandomHue", 0.3, **_UNIT),
    "RandomInvert": _picture("RandomInvert", **_UNIT),
    "RandomPerspective": _picture("RandomPerspective"),
    "RandomPosterization": _picture("RandomPosterization", 4, **_UNIT),
    "RandomRotation": _picture("RandomRotation", 0.2),
    "RandomSaturation": _picture("RandomSaturation", 0.3, **_UNIT),
    "RandomSharpness": _picture("RandomSharpness", 0.3, **_UNIT),
    "RandomShear": _picture("RandomShear", 0.2, 0.2),
    "RandomTranslation": _picture("RandomTranslation", 0.2, 0.2),
    "RandomZoom": _picture("RandomZoom", 0.2),
    "ReLU": Case("sequence", lambda x: layers.ReLU()(x)),
    "RepeatVector": Case(
        "sequence", lambda x: layers.RepeatVector(3)(layers.GlobalMaxPooling1D()(x))
    ),
    "Rescaling": Case("sequence", lambda x: layers.Rescaling(0.5, 1.0)(x)),
    "Reshape": Case("sequence", lambda x: layers.Reshape((8, 32))(x)),
    "Resizing": Case("image", lambda x: layers.Resizing(7, 9)(x)),
    "ReversibleEmbedding": Case("tokens", lambda x: layers.ReversibleEmbedding(20, 16)(x)),
    "STFTSpectrogram": Case(
        "vector",
        lambda x: layers.STFTSpectrogram("psd", 64, 32, 64)(layers.Reshape((256, 1))(x)),
    ),
    "SeparableConv1D": Case("sequence", lambda x: layers.SeparableConv1D(8, 3)(x)),
    "SeparableConv2D": Case("image", lambda x: layers.SeparableConv2D(8, 3)(x)),
    "SimpleRNN": Case("sequence", lambda x: layers.SimpleRNN(16)(x)),
    "Softmax": Case("sequence", lambda x: layers.Softmax()(x)),
    "Solarization": _picture("Solarization", **_UNIT),
    "SpatialDropout1D": Case("sequence", lambda x: layers.SpatialDropout1D(0.3)(x)),
    "SpatialDropout2D": Case("image", lambda x: layers.SpatialDropout2D(0.3)(x)),
    "SpatialDropout3D": Case("volume", lambda x: layers.SpatialDropout3D(0.3)(x)),
    "SpectralNormalization": Case(
        "sequence", lambda x: layers.SpectralNormalization(layers.Dense(16))(x)
    ),
    "StringLookup": Case(
        "tokens", lambda x: layers.StringLookup(vocabulary=["1", "7", "19"])(_strings(x))
    ),
    "Subtract": Case("sequence", _both(layers.Subtract)),
    "TextVectorization": Case("tokens", _text),
    "TimeDistributed": Case("sequence", lambda x: layers.TimeDistributed(layers.Dense(8))(x)),
    "UnitNormalization": Case("sequence", lambda x: layers.UnitNormalization()(x)),
    "UpSampling1D": Case("sequence", lambda x: layers.UpSampling1D(2)(x)),
    "UpSampling2D": Case("image", lambda x: layers.UpSampling2D(interpolation="bilinear")(x)),
    "UpSampling3D": Case("volume", lambda x: layers.UpSampling3D(2)(x)),
    "ZeroPadding1D": Case("sequence", lambda x: layers.ZeroPadding1D(2)(x)),
    "ZeroPadding2D": Case("image", lambda x: layers.ZeroPadding2D(2)(x)),
    "ZeroPadding3D": Case("volume", lambda x: layers.ZeroPadding3D(1)(x)),
}

LEFT_OUT = {
    "Layer": "the base class",
    "Wrapper": "the base class of layers around a layer",
    "InputLayer": "computes nothing; every functional model has one",
    "FlaxLayer": "needs JAX",
    "JaxLayer": "needs JAX",
    "TorchModuleWrapper": "needs PyTorch",
    "TFSMLayer": "computes the operations of an exported model, whatever they are",
    "AugMix": "draws by Python's random module, which ddl refuses",
    "CutMix": "mixes the examples of a batch, which ddl refuses",
    "MixUp": "mixes the examples of a batch, which ddl refuses",
    "MaxNumBoundingBoxes": "takes bounding boxes in place of a tensor",
}
"""Classes without a case, and why."""


def classes() -> dict[str, tuple[str, ...]]:
    """Returns all names of each layer class of Keras, by its own name."""
    found: dict[str, tuple[str, ...]] = {}
    for name in sorted(vars(layers)):
        item = getattr(layers, name)
        if isinstance(item, type) and issubclass(item, keras.layers.Layer):
            found[item.__name__] = (*found.get(item.__name__, ()), name)
    return found


class Branches:
    """A task whose loss is the sum of the losses of the branches."""

    def __init__(self, cases: Mapping[str, Case]):
        """Builds the branches of some cases."""
        inputs = {
            key: keras.Input(values.shape[1:], dtype=values.dtype.name, name=key)
            for key, values in INPUTS.items()
            if any(case.given == key for case in cases.values())
        }
        self.branches: dict[str, keras.Model] = {}
        for name, case in cases.items():
            given = inputs[case.given]
            x = given
            if case.given not in ("rgb", "tokens"):
                x = layers.Dense(16 if case.given == "sequence" else x.shape[-1])(x)
            x = case.layer(x)
            x = layers.Flatten()(layers.Lambda(lambda x: tf.cast(x, tf.float32))(x))
            self.branches[name] = keras.Model(given, layers.Dense(5)(x), name=name)
        self.given = {name: case.given for name, case in cases.items()}
        self.keys = [*inputs]
        outputs = [branch(inputs[self.given[name]]) for name, branch in self.branches.items()]
        self.model = keras.Model([*inputs.values()], outputs)

    def per_example(self, features: dict[str, tf.Tensor], training: bool) -> ddl.PerExample:
        """Returns the loss of each example."""
        logits = self.model([features[key] for key in self.keys], training=training)
        label = features["label"]
        losses = [
            tf.nn.sparse_softmax_cross_entropy_with_logits(label, own)
            for own in (logits if isinstance(logits, list) else [logits])
        ]
        return ddl.PerExample(tf.add_n(losses))


def trained(
    cases: Mapping[str, Case], strategy: tf.distribute.Strategy, steps: int, **arguments: Any
) -> dict[str, str]:
    """Trains branches; returns the digest of each one's variables, of equal copies one."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        task = Branches(cases)
        trainer = ddl.Trainer(
            task,
            ddl.optimizers.FusedAdam(0.01),
            {"label": LABELS, **{key: INPUTS[key] for key in task.keys}},
            global_batch_size=64,
            seed=5,
            **arguments,
        )
    trainer.train(steps, progress=False)
    found = {}
    for name, branch in task.branches.items():
        own = hashlib.sha256()
        for variable in branch.variables:
            copies = strategy.experimental_local_results(variable.value)
            for copy in dict.fromkeys(copy.numpy().tobytes() for copy in copies):
                own.update(copy)
        found[name] = own.hexdigest()
    return found


def all_trained(
    cases: Mapping[str, Case],
    strategy: tf.distribute.Strategy,
    steps: int = STEPS,
    **arguments: Any,
) -> dict[str, str]:
    """Trains branches, some in each model; returns the digests of `trained`."""
    RowIndependence.check = lambda *_: None  # type: ignore[method-assign]  # a third of the time
    found, names = {}, [*cases]
    for first in range(0, len(names), _TOGETHER):
        together = {name: cases[name] for name in names[first : first + _TOGETHER]}
        found |= trained(together, strategy, steps, **arguments)
    return found


def main(*names: str) -> None:
    """Trains branches and prints the digests."""
    cases = {name: CASES[name] for name in names or CASES}
    print(json.dumps(all_trained(cases, tf.distribute.get_strategy())))


if __name__ == "__main__":
    main(*sys.argv[1:])
