"""A short run of each Trainer feature, and a digest of its results.

    python -m tests.training.repeated_runs STRATEGY REPLICAS [NAME]...

prints the digests as JSON. tests/training/test_repeatability.py compares them between processes.
"""

import collections
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
from tests.conftest import make_strategy
from tests.training import parity_cases

STEPS = 60
_BATCH = 64
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


def mlp() -> ddl.Classification:
    return classifier(layers.Flatten(), layers.Dense(128, "relu"))


def regularized() -> ddl.Classification:
    l2 = keras.regularizers.L2(0.01)
    hidden = [layers.Dense(32, "relu", kernel_regularizer=l2) for _ in range(3)]
    return classifier(layers.Flatten(), *hidden)


def rows(*hidden: Any) -> ddl.Classification:
    return classifier(layers.Reshape((8, 8)), *hidden)


def transformer() -> ddl.Classification:
    """Builds a transformer: each attention's input is used four times, each MLP's input twice."""
    inputs = keras.Input((8, 8, 1))
    x = layers.Dense(64)(layers.Reshape((8, 8))(layers.Rescaling(1 / 16)(inputs)))
    for _ in range(2):
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


def shared() -> ddl.Classification:
    inputs = keras.Input((8, 8, 1))
    layer = layers.Dense(64, "tanh")
    x = layers.Dense(64)(layers.Flatten()(layers.Rescaling(1 / 16)(inputs)))
    for _ in range(5):
        x = layer(x)
    return ddl.Classification(keras.Model(inputs, layers.Dense(10)(x)))


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


@dataclasses.dataclass(frozen=True)
class Case:
    """The configuration of a run."""

    task: Callable[[], Any] = mlp
    optimizer: Callable[[], keras.optimizers.Optimizer] = momentum
    data: Any = dataclasses.field(default_factory=lambda: DIGITS)
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    precision: str = "float32"


def optimizers() -> dict[str, Case]:
    own, of_keras = ddl.optimizers, keras.optimizers
    made: dict[str, Callable[[], Any]] = {
        "Adam": lambda: of_keras.Adam(1e-3),
        "AdamW of Keras": lambda: of_keras.AdamW(1e-3),
        "FusedAdam": lambda: own.FusedAdam(1e-3),
        "FusedAdam, amsgrad": lambda: own.FusedAdam(1e-3, amsgrad=True),
        "FusedAdamW": lambda: own.FusedAdamW(1e-3),
        "FusedRMSprop": lambda: own.FusedRMSprop(1e-3, centered=True, momentum=0.9),
        "FusedAdagrad": lambda: own.FusedAdagrad(1e-2),
        "FusedSGD": lambda: own.FusedSGD(0.05, momentum=0.9, nesterov=True),
        "MomentumSGD": lambda: own.MomentumSGD(0.05, weight_decay=1e-4),
        "LARS": lambda: own.LARS(0.5, weight_decay=1e-4),
        "LAMB": lambda: own.LAMB(1e-2, weight_decay=1e-2),
    }
    return {name: Case(cnn, optimizer) for name, optimizer in made.items()}


NOISE_SCALE = {
    "accumulation_steps": 2,
    "clip_norm": 1.0,
    "gradient_noise_scale": ddl.GradientNoiseScale(),
}

CASES: dict[str, Case] = {
    "plain": Case(),
    "padded batches": Case(cnn, data=PADDED),
    "weights in the data": Case(synchronized, data=WEIGHED),
    "stream": Case(cnn, data=lambda: stream(DIGITS)),
    "data not on the device": Case(cnn, arguments={"data_on_device": False}),
    "dropout": Case(lambda: cnn(block_dropout=0.25, hidden_dropout=0.5)),
    "all dropout and noise layers": Case(parity_cases.noisy, data=parity_cases.UNEVEN),
    "augmentation": Case(parity_cases.augmented, data=parity_cases.UNEVEN),
    "synchronized BatchNormalization": Case(synchronized),
    "synchronized BatchNormalization, padded": Case(synchronized, data=PADDED),
    "BatchNormalization of each replica": Case(
        lambda: classifier(
            layers.Conv2D(16, 3), layers.BatchNormalization(), layers.ReLU(), layers.MaxPooling2D()
        ),
    ),
    "accumulation": Case(synchronized, arguments={"accumulation_steps": 4}),
    "clip_norm": Case(cnn, arguments={"clip_norm": 0.1}),
    "clip_value": Case(cnn, arguments={"clip_value": 0.001}),
    "weight average": Case(
        synchronized, arguments={"weight_average": ddl.ExponentialMovingAverage(0.9)}
    ),
    "loss scale": Case(synchronized, arguments={"loss_scale": ddl.LossScale()}),
    "mixed_float16": Case(synchronized, precision="mixed_float16"),
    "mixed_bfloat16": Case(synchronized, precision="mixed_bfloat16"),
    "gradients in float16": Case(cnn, arguments={"gradient_dtype": "float16"}),
    "gradients in bfloat16": Case(cnn, arguments={"gradient_dtype": "bfloat16"}),
    "L2": Case(regularized, arguments={"clip_norm": 0.5}),
    "noise scale": Case(
        synchronized,
        arguments={**NOISE_SCALE, "weight_average": ddl.ExponentialMovingAverage(0.9)},
    ),
    "noise scale, no pooling": Case(transformer, arguments=NOISE_SCALE),
    **optimizers(),
    "sparse gradients": Case(tokens, arguments={"clip_norm": 0.1}),
    "sparse gradients, FusedAdam": Case(
        tokens, lambda: ddl.optimizers.FusedAdam(1e-2), arguments={"accumulation_steps": 2}
    ),
    "several poolings": Case(
        lambda: classifier(
            layers.Conv2D(16, 3, padding="same"),
            layers.MaxPooling2D(),
            layers.Conv2D(16, 3, padding="same", activation="relu"),
            layers.AveragePooling2D(2),
        )
    ),
    "overlapping max pooling": Case(
        lambda: classifier(layers.Conv2D(16, 3), layers.MaxPooling2D(3, 1)),
        arguments={"accumulation_steps": 2},
    ),
    "depthwise and separable": Case(
        lambda: classifier(
            layers.DepthwiseConv2D(3, depth_multiplier=8, padding="same", activation="relu"),
            layers.SeparableConv2D(16, 3, activation="relu"),
            layers.Conv2DTranspose(8, 3, strides=2),
        )
    ),
    "one and three dimensions": Case(
        lambda: classifier(
            layers.Reshape((4, 4, 4, 1)),
            layers.Conv3D(8, 2, activation="relu"),
            layers.MaxPooling3D(2, 1),
            layers.Reshape((8, 8)),
            layers.Conv1D(16, 3),
        )
    ),
    "LSTM": Case(lambda: rows(layers.LSTM(64, return_sequences=True), layers.LSTM(32))),
    "GRU": Case(lambda: rows(layers.Bidirectional(layers.GRU(64)))),
    "GRU, unrolled": Case(lambda: rows(layers.GRU(64, unroll=True))),
    "attention": Case(transformer, lambda: keras.optimizers.Adam(1e-3)),
    "attention, clip_norm": Case(
        transformer,
        lambda: ddl.optimizers.FusedAdam(1e-3),
        arguments={"clip_norm": 1.0, "accumulation_steps": 2},
    ),
    "DenseNet": Case(dense_net),
    "a layer used five times": Case(shared),
    "GroupNormalization": Case(
        lambda: classifier(
            layers.Conv2D(16, 3), layers.GroupNormalization(4), layers.UnitNormalization()
        )
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


def main(name: str, replicas: str, *cases: str) -> None:
    strategy = make_strategy(name, int(replicas))
    digests = collections.OrderedDict()
    for case in cases or CASES:
        digests[case] = digest(CASES[case], strategy)
        print(case, digests[case][:12], file=sys.stderr, flush=True)
    print(json.dumps(digests))


if __name__ == "__main__":
    main(*sys.argv[1:])
