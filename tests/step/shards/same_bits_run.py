"""A short run with `batch_shards`, and a digest of all that it learned.

    python -m tests.step.shards.same_bits_run CASE STRATEGY REPLICAS [PRECISION]

prints the digest and the repr of the loss. tests/step/shards/test_same_bits.py compares processes.
"""

import hashlib
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np

import ddl
from ddl.data import load_digits
from ddl.distribution import build_strategy
from ddl.distribution.devices import configure_devices
from ddl.layers import RandomShift
from ddl.precision import set_precision

SHARDS = 4
STEPS = 6


def task(case: str) -> ddl.Classification:
    if case == "mlp":
        return ddl.Classification(ddl.models.mlp((8, 8, 1), 10, hidden_units=(64, 32)))
    model = ddl.models.cnn(
        (8, 8, 1), 10, blocks=((8,),), batch_normalization=True, hidden_dropout=0.3
    )
    return ddl.Classification(model, augmentations=[RandomShift(1, 1)])


def trainer(case: str, strategy: str, replicas: int, shards: int | None = SHARDS) -> ddl.Trainer:
    images, labels = load_digits("train")
    placed = build_strategy(strategy)
    assert placed.num_replicas_in_sync == replicas
    keras.utils.set_random_seed(0)
    with placed.scope():
        return ddl.Trainer(
            task(case),
            ddl.optimizers.FusedAdam(0.01),
            {"image": images[:150], "label": labels[:150]},  # the last batch has padding
            global_batch_size=64,
            strategy=placed,
            accumulation_steps=1 if case == "mlp" else 2,
            batch_shards=shards,
            clip_norm=0.5,
            weight_average=ddl.ExponentialMovingAverage(0.9),
        )


def digest(trained: ddl.Trainer) -> str:
    found = hashlib.sha256()
    averages = [] if trained.averages is None else trained.averages.variables
    for variable in [*trained.model.weights, *trained.optimizer.variables, *averages]:
        found.update(np.asarray(variable.numpy()).tobytes())
    return found.hexdigest()


def main(case: str, strategy: str, replicas: str, precision: str = "float32") -> None:
    configure_devices(num_virtual_devices=int(replicas), same_bits=True)
    set_precision(precision)
    trained = trainer(case, strategy, int(replicas))
    figures = trained.train(STEPS, progress=False)
    print(digest(trained), repr(figures["loss"]))


if __name__ == "__main__":
    main(*sys.argv[1:])
