"""A program that trains a deep perceptron and prints by how many MB its memory grew at most."""

import json
import sys
from pathlib import Path

import keras
import numpy as np

import ddl
from ddl.step.observing import observed_by
from ddl.step.remat.activations import Activations

WIDTH, ROWS, BLOCKS = 512, 4096, 16


def network() -> keras.Model:
    """Builds residual blocks, each with one wide layer."""
    inputs = keras.Input((8,))
    x = keras.layers.Dense(WIDTH)(inputs)
    for number in range(BLOCKS):
        branch = keras.layers.LayerNormalization(name=f"block{number}_norm")(x)
        branch = keras.layers.Dense(WIDTH, "gelu", name=f"block{number}_dense")(branch)
        x = keras.layers.Add(name=f"block{number}_add")([x, branch])
    return keras.Model(inputs, keras.layers.Dense(3)(x))


def peak() -> float:
    """Returns the peak of the resident memory in MB."""
    status = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in status if line.startswith("VmHWM")]
    return int(line.split()[1]) / 1024


def main() -> None:
    remat = ddl.Remat("block*") if sys.argv[1] == "on" else None
    random = np.random.default_rng(0)
    data = random.normal(size=(ROWS, 8)).astype("f4"), random.integers(0, 3, ROWS)
    keras.utils.set_random_seed(0)
    task = ddl.Classification(network())
    trainer = ddl.Trainer(
        task, keras.optimizers.SGD(0.01), data, global_batch_size=ROWS, remat=remat
    )
    with observed_by(activations := Activations()):
        trainer.trace()
    before = peak()
    loss = trainer.train(2, progress=False)["loss"]
    predicted = (activations.bytes or 0) / 2**20
    print(json.dumps({"grown": peak() - before, "predicted": predicted, "loss": loss}))


if __name__ == "__main__":
    main()
