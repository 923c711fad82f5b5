"""Short runs that use all features of the Trainer, and a digest of the result of each.

    python -m tests.training.repeated_runs [NAME]...

prints the digests as JSON. tests/training/test_repeatability.py compares them between processes.

Each run combines many features, since tracing costs most and one feature that does not repeat
changes the digest of the whole run. Features that hide small differences, such as float16, are
combined with each other alone.
"""

import dataclasses
import hashlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

import ddl
from ddl.data import load_digits
from ddl.precision import set_precision
from tests.conftest import make_strategy, name_of
from tests.training import parity_cases

STEPS = 40
_BATCH = 48  # divides among 1, 2 and 3 replicas, with 1, 2 or 4 microbatches
_IMAGES, _LABELS = load_digits("train")
DIGITS = {"image": _IMAGES[:640], "label": _LABELS[:640]}
PADDED = {"image": _IMAGES[:601], "label": _LABELS[:601]}
WEIGHED = PADDED | {"weight": np.random.default_rng(0).uniform(0, 2, 601).astype("f4")}
layers = keras.layers


def classifier(*hidden: Any, **arguments: Any) -> ddl.Classification:
    """Builds a classifier of 8×8 images with the given hidden layers."""
    head = [layers.Flatten(), layers.Dense(10)]
    scaled = [keras.Input((8, 8, 1)), layers.Rescaling(1 / 16)]
    return ddl.Classification(keras.Sequential([*scaled, *hidden, *head]), **arguments)


def cnn(**arguments: Any) -> ddl.Classification:
    model = ddl.models.cnn((8, 8, 1), 10, blocks=((16, 32),), input_scale=1 / 16, **arguments)
    return ddl.Classification(model)


def synchronized() -> ddl.Classification:
    return cnn(batch_normalization=True)


def regularized() -> ddl.Classification:
    """Builds a classifier with penalties, one layer of which is used five times."""
    inputs = keras.Input((8, 8, 1))
    hidden = layers.Dense(32, "tanh", kernel_regularizer=keras.regularizers.L2(0.01))
    layer = layers.Dense(32, "tanh", kernel_regularizer=keras.regularizers.L2(0.01))
    x = hidden(layers.Flatten()(layers.Rescaling(1 / 16)(inputs)))
    for _ in range(5):
        x = layer(x)
    return ddl.Classification(keras.Model(inputs, layers.Dense(10)(x)))


def convolutions() -> ddl.Classification:
    return classifier(
        layers.Conv2D(16, 3, padding="same"),
        layers.MaxPooling2D(3, 1),
        layers.DepthwiseConv2D(3, depth_multiplier=2, padding="same", activation="relu"),
        layers.MaxPooling2D(),
        layers.SeparableConv2D(16, 3, padding="same", activation="relu"),
        layers.Conv2DTranspose(8, 3, strides=2),
        layers.GroupNormalization(4),
        layers.UnitNormalization(),
        layers.AveragePooling2D(2),
    )


def one_and_three_dimensions() -> ddl.Classification:
    return classifier(
        layers.Reshape((4, 4, 4, 1)),
        layers.Conv3D(8, 2, activation="relu"),
        layers.MaxPooling3D(2, 1),
        layers.Reshape((8, 8)),
        layers.Conv1D(16, 3),
        layers.BatchNormalization(),
    )


def recurrent() -> ddl.Classification:
    return classifier(
        layers.Reshape((8, 8)),
        layers.LSTM(32, return_sequences=True),
        layers.Bidirectional(layers.GRU(16, return_sequences=True)),
        layers.GRU(32, unroll=True),
    )


def transformer() -> ddl.Classification:
    """Builds a transformer: the attention's input is used four times, the MLP's input twice."""
    inputs = keras.Input((8, 8, 1))
    x = layers.Dense(64)(layers.Reshape((8, 8))(layers.Rescaling(1 / 16)(inputs)))
    x = layers.MultiHeadAttention(4, 16)(x, x) + x
    y = layers.LayerNormalization()(x)
    x = x + layers.Dense(64)(layers.Dense(128, "gelu")(y)) + layers.Dense(64, "tanh")(y)
    return ddl.Classification(keras.Model(inputs, layers.Dense(10)(layers.Flatten()(x))))


def dense_net() -> ddl.Classification:
    inputs = keras.Input((8, 8, 1))
    found = [layers.Rescaling(1 / 16)(inputs)]
    for _ in range(4):
        x = layers.Concatenate()(found) if len(found) > 1 else found[0]
        x = layers.BatchNormalization()(layers.Conv2D(8, 3, padding="same")(x))
        found.append(layers.ReLU()(x))
    x = layers.Flatten()(layers.Concatenate()(found))
    return ddl.Classification(keras.Model(inputs, layers.Dense(10)(x)))


def augmented_and_noisy() -> ddl.Classification:
    model = parity_cases.noisy().model
    return ddl.Classification(model, augmentations=parity_cases.augmentations())


def tokens() -> ddl.Classification:
    """Builds a classifier with sparse gradients, whose pixels index an embedding table."""
    inputs = keras.Input((8, 8, 1))
    words = layers.Reshape((64,))(layers.Lambda(lambda x: tf.cast(x, tf.int32))(inputs))
    x = layers.GlobalAveragePooling1D()(layers.Embedding(17, 16)(words))
    return ddl.Classification(keras.Model(inputs, layers.Dense(10)(x)))


def stream(examples: Mapping[str, np.ndarray]) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(dict(examples))


def momentum() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.05, momentum=0.9)


MIRRORED = (("mirrored", 3),)  # the order of a sum of two does not matter
ONE_DEVICE = (("one_device", 1),)
CENTRAL_STORAGE = (("central_storage", 2),)
ALL = MIRRORED + ONE_DEVICE + CENTRAL_STORAGE


@dataclasses.dataclass(frozen=True)
class Case:
    """The configuration of a run, and the strategies that it is repeated under."""

    task: Callable[[], Any]
    optimizer: Callable[[], keras.optimizers.Optimizer] = momentum
    data: Any = dataclasses.field(default_factory=lambda: DIGITS)
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    precision: str = "float32"
    strategies: tuple[tuple[str, int], ...] = MIRRORED


own, of_keras = ddl.optimizers, keras.optimizers
AVERAGE = ddl.ExponentialMovingAverage(0.9)

CASES: dict[str, Case] = {
    "synchronized BatchNormalization, padded batches, accumulation": Case(
        synchronized,
        lambda: own.LARS(0.5, weight_decay=1e-4),
        PADDED,
        {
            "accumulation_steps": 4,
            "clip_norm": 1.0,
            "weight_average": AVERAGE,
        },
        strategies=MIRRORED + CENTRAL_STORAGE,
    ),
    "stream, dropout": Case(
        lambda: cnn(block_dropout=0.25, hidden_dropout=0.5),
        lambda: own.FusedSGD(0.05, momentum=0.9, nesterov=True),
        lambda: stream(DIGITS),
        strategies=MIRRORED + ONE_DEVICE,
    ),
    "augmentation, dropout and noise layers, data not on the device": Case(
        augmented_and_noisy,
        lambda: own.FusedAdamW(1e-3),
        parity_cases.UNEVEN,
        {"data_on_device": False},
    ),
    "mixed_float16": Case(
        synchronized,
        lambda: own.FusedAdam(1e-3, amsgrad=True),
        precision="mixed_float16",
    ),
    "mixed_bfloat16, padded batches": Case(
        cnn,
        lambda: own.FusedRMSprop(1e-3, centered=True, momentum=0.9),
        PADDED,
        precision="mixed_bfloat16",
    ),
    "sparse gradients": Case(
        tokens,
        lambda: own.MomentumSGD(0.05, weight_decay=1e-4),
        arguments={"clip_norm": 0.1},
        strategies=CENTRAL_STORAGE,
    ),
    "sparse gradients, accumulation": Case(
        tokens,
        lambda: own.FusedAdam(1e-2),
        arguments={"accumulation_steps": 2},
    ),
    "penalties, a layer used five times": Case(
        regularized, lambda: of_keras.AdamW(1e-3), arguments={"clip_norm": 0.5}
    ),
    "convolutions, poolings, GroupNormalization": Case(
        convolutions, lambda: own.LAMB(1e-2, weight_decay=1e-2)
    ),
    "one and three dimensions, BatchNormalization of each replica": Case(
        one_and_three_dimensions,
        lambda: own.FusedAdagrad(1e-2),
        arguments={"accumulation_steps": 2},
    ),
    "recurrent layers": Case(recurrent, strategies=ONE_DEVICE),
    "attention": Case(transformer, lambda: of_keras.Adam(1e-3), strategies=ONE_DEVICE),
    "attention, accumulation": Case(
        transformer,
        lambda: own.FusedAdam(1e-3),
        arguments={"accumulation_steps": 2, "clip_norm": 1.0},
    ),
    "DenseNet, weights in the data, loss scale, weight average": Case(
        dense_net,
        data=WEIGHED,
        arguments={"loss_scale": ddl.LossScale(), "weight_average": AVERAGE},
    ),
}


def digest(case: Case, strategy: tf.distribute.Strategy) -> str:
    """Trains; returns the SHA-256 of all replicas' variables, the state and the figures."""
    keras.utils.clear_session()
    set_precision(case.precision)
    keras.utils.set_random_seed(3)
    with strategy.scope():
        trainer = ddl.Trainer(
            case.task(),
            case.optimizer(),
            case.data() if callable(case.data) else dict(case.data),
            global_batch_size=_BATCH,
            seed=5,
            **case.arguments,
        )
    figures = trainer.train(STEPS)
    variables = [*trainer.model.variables, *trainer.optimizer.variables, *trainer.generator_states]
    variables += trainer.averages.variables if trainer.averages else []
    found = hashlib.sha256(json.dumps(figures, sort_keys=True).encode())
    for variable in variables:
        own = variable.value if isinstance(variable, keras.Variable) else variable
        for copy in strategy.experimental_local_results(own):
            found.update(np.ascontiguousarray(copy.numpy()).tobytes())
    for value in trainer.state:
        found.update(value.numpy().tobytes())
    return found.hexdigest()


def main(*cases: str) -> None:
    strategies = {where: make_strategy(*where) for where in ALL}
    digests = {}
    for name in cases or CASES:
        for where in CASES[name].strategies:
            digests[f"{name_of(where)}: {name}"] = digest(CASES[name], strategies[where])
    print(json.dumps(digests))


if __name__ == "__main__":
    main(*sys.argv[1:])
