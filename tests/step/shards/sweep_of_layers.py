"""Layers trained with `batch_shards` on one device and on four, which have to end with equal bits.

    python -m tests.step.shards.sweep_of_layers [NAME]...

prints JSON: for each layer, whether the digests are equal.
"""

import json
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np

import ddl
from ddl.distribution import build_strategy
from ddl.distribution.devices import configure_devices
from tests.step.shards.same_bits_run import digest

layers = keras.layers
SHARDS, STEPS = 4, 3
_RANDOM = np.random.default_rng(0)
SEQUENCES = _RANDOM.normal(size=[48, 12, 8]).astype("f4")
IMAGES = _RANDOM.normal(size=[48, 10, 10, 4]).astype("f4")
VOLUMES = _RANDOM.normal(size=[48, 6, 6, 6, 3]).astype("f4")
TOKENS = _RANDOM.integers(0, 20, size=[48, 12])
LABELS = _RANDOM.integers(0, 5, size=[48])

CASES = {
    "Dense": (SEQUENCES, lambda x: layers.Dense(24, "gelu")(x)),
    "EinsumDense": (SEQUENCES, lambda x: layers.EinsumDense("btc,cd->btd", (12, 24))(x)),
    "Embedding": (TOKENS, lambda x: layers.Embedding(20, 24)(x)),
    "Conv1D": (SEQUENCES, lambda x: layers.Conv1D(24, 3)(x)),
    "Conv2D": (IMAGES, lambda x: layers.Conv2D(24, 3, padding="same", activation="relu")(x)),
    "Conv2D, strided": (IMAGES, lambda x: layers.Conv2D(24, 3, strides=2)(x)),
    "Conv2D, 1×1": (IMAGES, lambda x: layers.Conv2D(24, 1)(x)),
    "Conv2DTranspose": (IMAGES, lambda x: layers.Conv2DTranspose(8, 3, strides=2)(x)),
    "Conv3D": (VOLUMES, lambda x: layers.Conv3D(8, 3)(x)),
    "DepthwiseConv2D": (IMAGES, lambda x: layers.DepthwiseConv2D(3)(x)),
    "SeparableConv2D": (IMAGES, lambda x: layers.SeparableConv2D(8, 3)(x)),
    "MaxPooling2D": (IMAGES, lambda x: layers.MaxPooling2D(2)(layers.Conv2D(8, 1)(x))),
    "AveragePooling2D": (IMAGES, lambda x: layers.AveragePooling2D(2)(layers.Conv2D(8, 1)(x))),
    "GlobalAveragePooling2D": (
        IMAGES,
        lambda x: layers.GlobalAveragePooling2D()(layers.Conv2D(8, 1)(x)),
    ),
    "BatchNormalization": (
        IMAGES,
        lambda x: layers.BatchNormalization(synchronized=True)(layers.Conv2D(8, 1)(x)),
    ),
    "LayerNormalization": (SEQUENCES, lambda x: layers.LayerNormalization()(layers.Dense(8)(x))),
    "GroupNormalization": (IMAGES, lambda x: layers.GroupNormalization(2)(layers.Conv2D(8, 1)(x))),
    "RMSNormalization": (SEQUENCES, lambda x: layers.RMSNormalization()(layers.Dense(8)(x))),
    "UnitNormalization": (SEQUENCES, lambda x: layers.UnitNormalization()(layers.Dense(8)(x))),
    "MultiHeadAttention": (
        SEQUENCES,
        lambda x: ddl.layers.MultiHeadAttention(2, 8, dropout=0.1)(x, x),
    ),
    "GroupQueryAttention": (SEQUENCES, lambda x: layers.GroupQueryAttention(8, 4, 2)(x, x)),
    "LSTM": (SEQUENCES, lambda x: ddl.layers.LSTM(16)(x)),
    "GRU": (SEQUENCES, lambda x: ddl.layers.GRU(16)(x)),
    "SimpleRNN": (SEQUENCES, lambda x: ddl.layers.SimpleRNN(16)(x)),
    "Bidirectional": (SEQUENCES, lambda x: layers.Bidirectional(layers.GRU(8))(x)),
    "ConvLSTM1D": (IMAGES, lambda x: layers.ConvLSTM1D(4, 3)(x)),
    "UpSampling2D": (
        IMAGES,
        lambda x: layers.UpSampling2D(interpolation="bilinear")(layers.Conv2D(4, 1)(x)),
    ),
    "PReLU": (SEQUENCES, lambda x: layers.PReLU()(x)),
    "Softmax": (SEQUENCES, lambda x: layers.Softmax()(layers.Dense(8)(x))),
    "Dropout": (SEQUENCES, lambda x: ddl.layers.Dropout(0.3)(layers.Dense(8)(x))),
    "GaussianNoise": (SEQUENCES, lambda x: ddl.layers.GaussianNoise(0.3)(layers.Dense(8)(x))),
}


def trained(name: str, strategy: str) -> str:
    inputs, layer = CASES[name]
    placed = build_strategy(strategy)
    keras.utils.set_random_seed(0)
    with placed.scope():
        given = keras.Input(inputs.shape[1:], dtype=inputs.dtype)
        logits = layers.Dense(5)(layers.Flatten()(layer(given)))
        trainer = ddl.Trainer(
            ddl.Classification(keras.Model(given, logits)),
            ddl.optimizers.FusedAdam(0.01),
            (inputs, LABELS),
            global_batch_size=32,
            strategy=placed,
            batch_shards=SHARDS,
        )
    trainer.train(STEPS, progress=False)
    return digest(trainer)


def main(*names: str) -> None:
    configure_devices(num_virtual_devices=4, same_bits=True)
    found = {
        name: trained(name, "one_device") == trained(name, "mirrored") for name in names or CASES
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
