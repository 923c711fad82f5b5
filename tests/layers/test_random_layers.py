"""Layers and models of Keras train alike on any devices: the table of docs/parity.md.

Each layer has a head and a loss of its own in the model of its family, so that each has a figure.
"""

import functools
import inspect
from collections.abc import Callable
from itertools import chain
from typing import NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import ddl
from ddl.errors import ConfigError
from ddl.precision import set_precision
from tests.conftest import make_strategy

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


class Sentences(layers.Layer):
    """A classifier of keras-hub, of tokens alone."""

    def __init__(self, rank=None):
        import keras_hub

        super().__init__()
        backbone = keras_hub.models.BertBackbone(11, 1, 2, 8, 16, 0.2, max_sequence_length=6)
        if rank is not None:
            backbone.enable_lora(rank)
        self.classifier = keras_hub.models.BertTextClassifier(backbone, 3, dropout=0.2)

    def call(self, x, training=False):
        features = {"token_ids": x, "segment_ids": 0 * x, "padding_mask": x > 0}
        return self.classifier(features, training=training)


def of_shape(shape, layer):
    return keras.Sequential([layers.Reshape(shape), layer])


def jitter(x):
    return x + keras.random.normal(keras.ops.shape(x), dtype=x.dtype)


def small(build, **options):
    return build(input_shape=(32, 32, 3), weights=None, include_top=False, pooling="avg", **options)


def of(names: str, *arguments, **named) -> dict:
    """Layers of Keras by name, with the same arguments."""
    return {n: functools.partial(getattr(layers, n), *arguments, **named) for n in names.split()}


IMAGES = of("RandomTranslation RandomZoom RandomShear", 0.3, 0.3) | {
    "RandomFlip": layers.RandomFlip,
    "RandomPerspective": lambda: layers.RandomPerspective(1.0, 0.5),
    "RandomCrop": lambda: layers.RandomCrop(5, 5),
    "RandomErasing": lambda: layers.RandomErasing(1.0),
    "RandomGaussianBlur": lambda: layers.RandomGaussianBlur(factor=1.0),
    "Pipeline": lambda: layers.Pipeline([layers.RandomFlip(), layers.RandomInvert(0.5)]),
    "RandomShift": lambda: ddl.layers.RandomShift(2, 1),
    "RandomResizedCrop": lambda: ddl.layers.RandomResizedCrop(6, 5),
}
IN_FLOAT32 = of("RandomRotation", 0.3)
COLOURS = of("RandomContrast RandomBrightness RandomColorDegeneration RandomHue", 0.5)
COLOURS |= of("RandomSaturation RandomSharpness RandomInvert RandomGrayscale", 0.5)
COLOURS |= of("RandomColorJitter", **COLORS) | of("RandomPosterization", 4)
COLOURS |= of("Solarization", 0.3, 0.3)
STEPS = of("Dropout SpatialDropout1D GaussianNoise GaussianDropout AlphaDropout", 0.4) | {
    "Dropout_by_step": lambda: layers.Dropout(0.4, noise_shape=(None, 1, None)),
    "Dropout_of_all_rows": lambda: layers.Dropout(0.4, noise_shape=(1, 5, 4)),
    "Attention": lambda: Itself(layers.Attention(dropout=0.4)),
    "AdditiveAttention": lambda: Itself(layers.AdditiveAttention(dropout=0.4)),
    "MultiHeadAttention": lambda: Itself(layers.MultiHeadAttention(2, 3, dropout=0.4)),
    "GroupQueryAttention": lambda: Itself(layers.GroupQueryAttention(3, 2, 1, dropout=0.4)),
    "TimeDistributed": lambda: layers.TimeDistributed(layers.Dropout(0.4)),
    "Lambda": lambda: layers.Lambda(jitter),
    "BatchNormalization": layers.BatchNormalization,
}
RECURRENT = of("LSTM GRU SimpleRNN", 3, **BOTH) | {
    "Bidirectional": lambda: layers.Bidirectional(
        layers.LSTM(3, **BOTH), backward_layer=layers.GRU(3, go_backwards=True, **BOTH)
    ),
    "RNN": lambda: layers.RNN([layers.LSTMCell(3, **BOTH), layers.GRUCell(3, **BOTH)]),
}
FRAMES = of("SpatialDropout3D", 0.4) | of("ConvLSTM2D", 2, 3, **BOTH)
FRAMES["SpatialDropout2D"] = lambda: layers.TimeDistributed(layers.SpatialDropout2D(0.4))
FRAMES["ConvLSTM1D"] = lambda: of_shape((4, 5, 10), layers.ConvLSTM1D(2, 3, **BOTH))
FRAMES["ConvLSTM3D"] = lambda: of_shape((4, 5, 5, 2, 1), layers.ConvLSTM3D(2, 1, **BOTH))
MOBILE_NET = {"MobileNetV2": lambda: small(keras.applications.MobileNetV2, alpha=0.35)}
RESNET = {"ResNet50V2": lambda: small(keras.applications.ResNet50V2)}
SENTENCES = {"BertTextClassifier": Sentences, "LoRA": lambda: Sentences(rank=2)}
REFUSED = ("Equalization", "RandAugment", "AugMix", "RandomElasticTransform", "MixUp", "CutMix")
NO_KERNELS = {"RandomTranslation", "RandomZoom", "RandomShear", "RandomPerspective"}
COMMUNICATE = {"BatchNormalization", "MobileNetV2", "ResNet50V2"}
# XLA compiles a RandomCrop anew in each update of several devices, and frames for many minutes.
WITHOUT_XLA = NO_KERNELS | IN_FLOAT32.keys() | COMMUNICATE | FRAMES.keys() | {"RandomCrop"}
# Too slow for each run of the tests, or, BatchNormalization, other in microbatches.
OF_THE_TABLE = {"BertTextClassifier", "LoRA", "LSTM", "SimpleRNN", "RNN", "ConvLSTM1D"}
OF_THE_TABLE |= {"ConvLSTM3D", "GroupQueryAttention", "RandomPerspective"} | COMMUNICATE
# In each run of the tests as parts of "Bidirectional", "Pipeline" and "RandomColorJitter".
OF_THE_TABLE |= {"GRU", "RandomFlip", "RandomInvert"}
OF_THE_TABLE |= {"RandomBrightness", "RandomContrast", "RandomSaturation", "RandomHue"}


class Family(NamedTuple):
    """Layers that share inputs.

    Attributes:
      kinds: Functions that make a layer, by name.
      data: Inputs, [20, …].
      scale: Factor of a layer's outputs.
      precision: Keras's precision.
      tolerance: Largest difference of a weight.
    """

    kinds: dict[str, Callable[[], layers.Layer]]
    data: np.ndarray
    scale: float = 1.0
    precision: str = "float64"
    tolerance: float = 1e-10


RANDOM = np.random.default_rng(0)
PIXELS = RANDOM.uniform(0, 255, (20, 8, 8, 3))
SERIES = RANDOM.normal(size=(20, 5, 4))
SMALL_IMAGES = RANDOM.normal(size=(20, 32, 32, 3))
FAMILIES = {
    "images": Family(IMAGES | COLOURS, PIXELS, 0.01),
    "float32": Family(IN_FLOAT32, PIXELS, 0.01, "float32", 1e-5),
    "series": Family(STEPS | RECURRENT, SERIES),
    "frames": Family(FRAMES, RANDOM.normal(size=(20, 4, 5, 5, 2))),
    # At larger rates one device amplifies rounding of its own weights as much.
    "MobileNetV2": Family(MOBILE_NET, SMALL_IMAGES, 1e-7),
    "ResNet50V2": Family(RESNET, SMALL_IMAGES, 1e-7),
    "keras-hub": Family(SENTENCES, RANDOM.integers(0, 11, (20, 6))),
}


class Heads:
    """A task with a dense layer and a loss for each layer of a family."""

    def __init__(self, family: Family, without: set[str]):
        example = family.data[0]
        x = keras.Input(example.shape, dtype=example.dtype if example.dtype.kind == "i" else None)
        self.heads = {
            name: keras.Sequential(
                [make(), layers.Flatten(), layers.Rescaling(family.scale), layers.Dense(3)],
                name=name,
            )
            for name, make in family.kinds.items()
            if name not in without
        }
        self.model = keras.Model(x, {name: head(x) for name, head in self.heads.items()})

    def per_example(self, features, training):
        outputs = self.model(features["input"], training=training)
        cross_entropy = tf.nn.sparse_softmax_cross_entropy_with_logits
        losses = [cross_entropy(features["label"], logits) for logits in outputs.values()]
        return ddl.PerExample(tf.add_n(losses))


def trained(family, updates, without, replicas, microbatches, jit_compile="off"):
    """Returns the weights of each layer and its head after updates of 8 rows, the last padded."""
    set_precision(family.precision)
    keras.utils.set_random_seed(2)
    with make_strategy("mirrored" if replicas > 1 else "one_device", replicas).scope():
        task, optimizer = Heads(family, without), keras.optimizers.SGD(0.05)
        options = {"accumulation_steps": microbatches, "jit_compile": jit_compile}
        data = family.data, np.arange(len(family.data)) % 3
        trainer = ddl.Trainer(task, optimizer, data, global_batch_size=8, **options)
    trainer.train(updates, progress=False)
    return {name: head.get_weights() for name, head in task.heads.items()}


def difference(ours: list[np.ndarray], others: list[np.ndarray]) -> float:
    return max(np.abs(one - other).max() for one, other in zip(ours, others, strict=True))


def families(without):
    return [name for name, family in FAMILIES.items() if family.kinds.keys() - without]


@pytest.mark.parametrize("name", families(OF_THE_TABLE))
def test_two_devices_and_microbatches_train_a_family_as_one(name):
    family = FAMILIES[name]
    one, two = (trained(family, 3, OF_THE_TABLE, each, each) for each in (1, 2))
    differences = {kind: difference(two[kind], one[kind]) for kind in one}
    assert {k: x for k, x in differences.items() if not x <= family.tolerance} == {}


@pytest.mark.release
@pytest.mark.parametrize(
    ("name", "jit_compile"),
    [*((name, "off") for name in FAMILIES), *((name, "on") for name in families(WITHOUT_XLA))],
)
def test_the_table_of_parity(name, jit_compile):
    """Prints a row for each kind: `pytest -m release -s`."""
    family, ways = FAMILIES[name], [(2, 1), (2, 2), (4, 1), (4, 2)]
    without = WITHOUT_XLA if jit_compile == "on" else set()
    one = {m: trained(family, 20, without, 1, m, jit_compile) for m in (1, 2)}
    ours = [trained(family, 20, without, *way, jit_compile) for way in ways]
    for kind in ours[0]:
        each = zip(ours, ways, strict=True)
        found = [difference(own[kind], one[m][kind]) for own, (_, m) in each]
        print(f"\n| {kind} | {family.precision} | {jit_compile} |", *(f"{x:.0e} |" for x in found))
        assert max(found) <= family.tolerance


def test_each_random_layer_of_keras_is_in_the_table_or_refused():
    found = set()
    for name, kind in vars(layers).items():
        if isinstance(kind, type) and issubclass(kind, layers.Layer):
            bases = [inspect.signature(base.__init__).parameters for base in kind.__mro__[:-1]]
            if {"seed", "dropout"} & {*chain(*bases)} and not name.endswith("Cell"):
                found.add(name)
    found -= {"JaxLayer", "FlaxLayer", "StackedRNNCells"}  # of another backend; by "RNN"
    of_table = chain(*(family.kinds for family in FAMILIES.values()))
    assert found - {*of_table, *REFUSED} == set()


@pytest.mark.parametrize("name", REFUSED)
def test_a_trainer_refuses_layers_of_whole_batches_by_name(name):
    model = keras.Sequential([keras.Input((6, 6, 3)), layers.Flatten(), layers.Dense(2)])
    task = ddl.Classification(model, augmentations=[getattr(layers, name)()])
    data = np.ones((4, 6, 6, 3)), np.zeros(4, int)
    with pytest.raises(ConfigError, match=rf"\({name}\) computes .* Call it in dataset.map"):
        ddl.Trainer(task, keras.optimizers.SGD(), data, global_batch_size=4)
