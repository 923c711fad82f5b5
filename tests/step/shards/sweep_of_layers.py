"""Layers trained with `batch_shards` on one device and on four, which have to end with equal bits.

    python -m tests.step.shards.sweep_of_layers [NAME]...

prints JSON: for each layer, whether the digests are equal.
"""

import json
import sys

import ddl
from ddl.distribution import build_strategy
from ddl.distribution.devices import configure_devices
from tests.training import layer_cases
from tests.training.layer_cases import Case, layers

SHARDS, STEPS = 4, 3
_OF_KERAS = dict(layer_cases.CASES)
del _OF_KERAS["SpectralNormalization"]  # refused: each shard would write its variable
_WITH_LOSS = _OF_KERAS.pop("ActivityRegularization")

CASES = {
    **_OF_KERAS,
    "Conv2D.strided": Case("image", lambda x: layers.Conv2D(24, 3, strides=2)(x)),
    "Conv2D.1x1": Case("image", lambda x: layers.Conv2D(24, 1)(x)),
    "ddl.MultiHeadAttention": Case(
        "sequence", lambda x: ddl.layers.MultiHeadAttention(2, 8, dropout=0.1)(x, x)
    ),
    "ddl.LSTM": Case("sequence", lambda x: ddl.layers.LSTM(16)(x)),
    "ddl.GRU": Case("sequence", lambda x: ddl.layers.GRU(16)(x)),
    "ddl.SimpleRNN": Case("sequence", lambda x: ddl.layers.SimpleRNN(16)(x)),
    "ddl.Dropout": Case("sequence", lambda x: ddl.layers.Dropout(0.3)(x)),
    "ddl.GaussianNoise": Case("sequence", lambda x: ddl.layers.GaussianNoise(0.3)(x)),
    # Not in one model with synchronized batch normalization, which is among the first ones.
    "ActivityRegularization": _WITH_LOSS,
}


def main(*names: str) -> None:
    configure_devices(num_virtual_devices=4, same_bits=True)
    cases = {name: CASES[name] for name in names or CASES}
    one, four = (
        layer_cases.all_trained(cases, build_strategy(place), STEPS, batch_shards=SHARDS)
        for place in ("one_device", "mirrored")
    )
    print(json.dumps({name: one[name] == four[name] for name in cases}))


if __name__ == "__main__":
    main(*sys.argv[1:])
