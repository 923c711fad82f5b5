"""Each model of `ddl.models` with a task, and each task of `ddl.tasks`, of the smallest sizes.

The cases train in float64 for five updates of a data set of 20 examples in batches of 8, so that
the third batch has padding. `resumed` and `straight` give all results of a run.
"""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import ddl
from ddl.checkpoints.checkpoints import Checkpoints
from ddl.precision import set_precision

RANDOM = np.random.default_rng(0)
EXAMPLES, BATCH, STEPS, BEFORE = 20, 8, 5, 2

IMAGES = RANDOM.integers(0, 256, (EXAMPLES, 8, 8, 1), np.uint8)
LABELS = RANDOM.integers(0, 3, EXAMPLES)
TOKENS = RANDOM.integers(0, 11, (EXAMPLES, 7))
DATA = {
    "images": {"image": IMAGES, "label": LABELS},
    "tokens": {
        "token": TOKENS[:, :-1],
        "next_token": TOKENS[:, 1:],
        "token_weight": RANDOM.uniform(size=(EXAMPLES, 6)),
    },
    "pixels": {"image": IMAGES, "label": RANDOM.integers(0, 4, (EXAMPLES, 8, 8))},
    "tables": {
        "numbers": RANDOM.normal(size=(EXAMPLES, 3)),
        "colour": RANDOM.integers(0, 4, EXAMPLES),
        "label": RANDOM.normal(size=EXAMPLES),
    },
    "documents": {
        "token": TOKENS,
        "segment": (np.arange(TOKENS.shape[1]) < RANDOM.integers(1, 8, (EXAMPLES, 1))).astype(int),
        "position": np.broadcast_to(np.arange(TOKENS.shape[1]), TOKENS.shape),
    },
    "several": {"image": IMAGES, "label": RANDOM.integers(0, 2, (EXAMPLES, 3))},
}


def recurrent():
    layers = [
        keras.layers.Embedding(11, 4),
        keras.layers.LSTM(5, dropout=0.3, return_sequences=True),
        keras.layers.Dense(11),
    ]
    return keras.Sequential([keras.Input((6,), dtype="int64"), *layers])


def of_pixels():
    layers = [keras.layers.Rescaling(1 / 255), keras.layers.Conv2D(4, 3, padding="same")]
    return keras.Sequential([keras.Input((8, 8, 1), name="image"), *layers])


def small_mlp(outputs=3):
    return ddl.models.mlp((8, 8, 1), outputs, hidden_units=(5,))


CASES = {
    "gpt": (
        "tokens",
        lambda: ddl.LanguageModel(ddl.models.gpt(11, 6, width=8, heads=2, blocks=1, dropout=0.2)),
    ),
    "bert": (
        "documents",
        lambda: ddl.MaskedLanguageModel(
            ddl.models.bert(12, 7, width=8, heads=2, blocks=1, dropout=0.2, packed=True),
            ddl.layers.TokenMasking(11, 11, rate=0.4),
        ),
    ),
    "lstm": ("tokens", lambda: ddl.LanguageModel(recurrent())),
    "vit": (
        "images",
        lambda: ddl.Classification(
            ddl.models.vit((8, 8, 1), 3, patch=4, width=8, heads=2, blocks=1, dropout=0.2)
        ),
    ),
    "pixels": (
        "pixels",
        lambda: ddl.Segmentation(of_pixels(), ignored=3, class_weight={1: 2.0, 2: 0.5}),
    ),
    "table": (
        "tables",
        lambda: ddl.Regression(
            ddl.models.table_mlp(1, numbers=3, categories={"colour": 4}, hidden_units=(5,)),
            loss="huber",
        ),
    ),
    "several": ("several", lambda: ddl.MultiLabel(small_mlp())),
    "cnn": (
        "images",
        lambda: ddl.Supervised(
            ddl.models.cnn((8, 8, 1), 3, blocks=((3,),), hidden_units=(4,), block_dropout=0.2),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None),
            metrics=["accuracy"],
            class_weight={1: 2.0},
        ),
    ),
    "resnet": (
        "images",
        lambda: ddl.Classification(
            ddl.models.resnet(
                (8, 8, 1),
                3,
                blocks=(1,),
                width=4,
                stem="small",
                input_mean=127.5,
                input_deviation=64.0,
            ),
            top_k=2,
        ),
    ),
}


def make_trainer(name: str, strategy: tf.distribute.Strategy) -> ddl.Trainer:
    set_precision("float64")
    keras.utils.set_random_seed(1)
    data, make_task = CASES[name]
    with strategy.scope():
        return ddl.Trainer(
            make_task(),
            keras.optimizers.SGD(0.05, momentum=0.9),
            DATA[data],
            global_batch_size=BATCH,
            eval_data=DATA[data],
            seed=3,
        )


def straight(trainer: ddl.Trainer, folder: Path) -> dict[str, Any]:
    """Trains to the end and saves on the way; returns the results."""
    trainer.train(BEFORE, progress=False)
    checkpoints = Checkpoints(folder, trainer)
    checkpoints.save()
    checkpoints.finish()
    return _rest(trainer)


def resumed(trainer: ddl.Trainer, folder: Path) -> dict[str, Any]:
    """Trains to the end from what `straight` saved, maybe on other devices."""
    assert Checkpoints(folder, trainer).restore_latest().step == BEFORE
    return _rest(trainer)


def _rest(trainer: ddl.Trainer) -> dict[str, Any]:
    trained = trainer.train(STEPS - BEFORE, progress=False)
    variables = [*trainer.model.variables, *trainer.optimizer.variables]
    return {
        **{f"trained {name}": value for name, value in trained.items()},
        **{f"evaluated {name}": value for name, value in trainer.evaluate().items()},
        **{f"variable {number}": v.numpy() for number, v in enumerate(variables)},
    }


def assert_close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """To 1e-10, beyond which rounding alone does not explain a difference."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-10, err_msg=name)


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """To the bit."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


class OnOneDevice:
    """The trainers of the cases on one device, and their results; each is traced once."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._trainers: dict[str, ddl.Trainer] = {}
        self._results: dict[str, dict[str, Any]] = {}

    def results(self, name: str) -> dict[str, Any]:
        """Returns the results of a run without interruption."""
        if name not in self._trainers:
            strategy = tf.distribute.OneDeviceStrategy("CPU:0")
            self._trainers[name] = make_trainer(name, strategy)
            self._results[name] = straight(self._trainers[name], self._folder / name)
        return self._results[name]

    def resumed(self, name: str, folder: Path) -> dict[str, Any]:
        """Returns the results of a run that begins with a checkpoint of other devices."""
        self.results(name)
        return resumed(self._trainers[name], folder)
