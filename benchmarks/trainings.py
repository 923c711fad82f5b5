"""Trainings of small networks by recipe and batch size, each done once and kept in a file."""

import dataclasses
import gc
import hashlib
import inspect
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras

import ddl
from ddl import distribution
from ddl.errors import TrainingDiverged
from ddl.learning_rate import LearningRate, ScalingRule

TARGET = 0.98
WARMUP_SHARE = 0.2
# An evaluation after each twentieth of a training.
EVALUATIONS = 20


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How to train at any batch size.

    Attributes:
      optimizer: Made with a learning rate.
      search: Of `SEARCHES`, which finds the rate at its batch size.
      scaling: How the rate follows the batch size from there.
      warms_up: Whether there is a warm-up.
    """

    optimizer: Callable[[Any], keras.optimizers.Optimizer]
    search: str
    scaling: ScalingRule
    warms_up: bool


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Of a training.

    Attributes:
      accuracy: At the end, from 0 to 1.
      reached_at: Updates until the first evaluation with the target; None if there was none.
      updates: In all.
    """

    accuracy: float
    reached_at: int | None
    updates: int


def small_cnn() -> keras.Model:
    """Two convolutions and a dense layer."""
    model = ddl.models.cnn(
        (8, 8, 1),
        10,
        blocks=((16,), (32,)),
        hidden_units=(64,),
        padding="same",
        batch_normalization=True,
    )
    for layer in model.layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            # The longest trainings make 9,380 updates, the shortest 150: too few for Keras's 0.99,
            # which would judge a recipe by what moving moments still hold of their start.
            layer.momentum = 0.9
    return model


def tutorial_cnn() -> keras.Model:
    """The tutorial's network."""
    return ddl.models.cnn(
        (8, 8, 1),
        10,
        blocks=((32, 64),),
        hidden_units=(128,),
        block_dropout=0.25,
        hidden_dropout=0.5,
    )


def train(
    recipe: Recipe,
    batch: int,
    rate: float,
    base_batch: int,
    seed: int,
    epochs: int,
    examples: tuple[tuple, tuple],
    model: Callable[[], keras.Model] = small_cnn,
    replicas: int = 1,
) -> Outcome:
    """Trains once, with evaluations on the way. `rate` is that at `base_batch`."""
    keras.utils.set_random_seed(seed)
    train_data, test_data = examples
    updates = epochs * math.ceil(len(train_data[0]) / batch)
    warmup = int(WARMUP_SHARE * updates) if recipe.warms_up else 0
    falling = keras.optimizers.schedules.PolynomialDecay(rate, updates - warmup, 0.0)
    schedule = LearningRate(
        falling,
        scaling=recipe.scaling,
        base_batch_size=base_batch,
        global_batch_size=batch,
        warmup_steps=warmup,
    )
    strategy = distribution.build_strategy("mirrored" if replicas > 1 else "one_device")
    with strategy.scope():
        trainer = ddl.Trainer(
            ddl.Classification(model()),
            recipe.optimizer(schedule),
            train_data,
            global_batch_size=batch,
            eval_data=test_data,
            seed=seed,
        )
    reached_at, accuracy = None, 0.0
    try:
        for part in range(1, EVALUATIONS + 1):
            trainer.train(part * updates // EVALUATIONS - trainer.step)
            accuracy = trainer.evaluate()["accuracy"]
            if accuracy >= TARGET and reached_at is None:
                reached_at = trainer.step
    except TrainingDiverged:
        accuracy = 0.0
    del trainer
    keras.backend.clear_session()
    gc.collect()
    return Outcome(accuracy, reached_at, updates)


class Cells:
    """Trainings by what they are; those that are done are read from a file."""

    def __init__(self, path: Path, what_matters: Sequence[Callable[..., Any]]):
        """Takes those of the same code, which is that of `what_matters` and of ddl's version."""
        self._path = path
        code = "".join(map(inspect.getsource, what_matters)) + ddl.__version__
        self._code = hashlib.sha256(code.encode()).hexdigest()
        kept = json.loads(path.read_text()) if path.exists() else {}
        self._done: dict[str, Any] = kept["cells"] if kept.get("code") == self._code else {}

    def __call__(self, name: str, *args: Any, **kwargs: Any) -> Outcome:
        """The outcome of `train` with these arguments, which `name` tells from any other."""
        if name not in self._done:
            outcome = train(*args, **kwargs)
            self._done[name] = dataclasses.asdict(outcome)
            self._path.parent.mkdir(parents=True, exist_ok=True)
            beside = self._path.with_suffix(".part")
            beside.write_text(json.dumps({"code": self._code, "cells": self._done}, indent=1))
            beside.replace(self._path)
            print(f"{name}: {100 * outcome.accuracy:.2f}%", flush=True)
        return Outcome(**self._done[name])

    def forget(self) -> None:
        """Removes the file."""
        self._path.unlink(missing_ok=True)
