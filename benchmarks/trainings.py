"""Trainings of small networks by recipe and batch size, with outcomes cached in a file."""

import dataclasses
import gc
import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras

import ddl
from benchmarks import networks
from ddl import distribution
from ddl.errors import TrainingDiverged
from ddl.optimizers.learning_rate import LearningRate, ScalingRule

TARGET = 0.98
WARMUP_SHARE = 0.2
# Evaluations per training, equally spaced.
EVALUATIONS = 20


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A recipe for training at any batch size.

    Attributes:
      optimizer: Builds the optimizer from a learning rate.
      search: Name in `SEARCHES` of the search that finds the rate at its batch size.
      scaling: Rule that scales this rate to other batch sizes.
      warms_up: Whether there is a warm-up.
    """

    optimizer: Callable[[Any], keras.optimizers.Optimizer]
    search: str
    scaling: ScalingRule
    warms_up: bool


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of a training.

    Attributes:
      accuracy: Final accuracy, from 0 to 1.
      reached_at: Updates until the first evaluation that reached the target; None if none did.
      updates: Total number of updates.
    """

    accuracy: float
    reached_at: int | None
    updates: int


def small_cnn() -> keras.Model:
    """Builds two convolutions and a dense layer."""
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
            # The longest trainings make 9,380 updates, the shortest 150. These are too few for
            # Keras's 0.99: the moving moments would still depend on their initial values.
            layer.momentum = 0.9
    return model


def tutorial_cnn() -> keras.Model:
    """Builds the tutorial's network."""
    return networks.cnn(8)


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
    evaluations: int = EVALUATIONS,
) -> Outcome:
    """Trains once with evaluations. `rate` is the learning rate at `base_batch`."""
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
        for part in range(1, evaluations + 1):
            trainer.train(part * updates // evaluations - trainer.step)
            accuracy = trainer.evaluate()["accuracy"]
            if accuracy >= TARGET and reached_at is None:
                reached_at = trainer.step
    except TrainingDiverged:
        accuracy = 0.0
    del trainer
    keras.backend.clear_session()
    gc.collect()
    return Outcome(accuracy, reached_at, updates)


def code_of() -> str:
    """Returns a hash of the code of a training: ddl's sources and this benchmark's modules."""
    here = Path(__file__).parent
    files = [here / f"{name}.py" for name in ("large_batch", "moved_digits", "trainings")]
    found = hashlib.sha256()
    for file in [*files, *sorted(Path(ddl.__file__).parent.rglob("*.py"))]:
        found.update(file.read_bytes())
    return found.hexdigest()


def key_of(
    name: str,
    recipe: Recipe,
    batch: int,
    rate: float,
    base_batch: int,
    seed: int,
    epochs: int,
    examples: tuple[tuple, tuple],
    model: Callable[[], keras.Model] = small_cnn,
    replicas: int = 1,
    evaluations: int = EVALUATIONS,
) -> str:
    """Returns the key of a training of the same code. `name` stands for recipe and data."""
    (images, _), (held_out, _) = examples
    return (
        f"{name}, batch {batch}, rate {rate!r} at {base_batch}, seed {seed}, {epochs} epochs of "
        f"{len(images)}, {evaluations} evaluations on {len(held_out)}, {model.__name__}, "
        f"{replicas} replicas"
    )


class Cells:
    """A cache of trainings in a file."""

    def __init__(self, path: Path):
        """Reads the outcomes of the same code from the file."""
        self._path = path
        self._code = code_of()
        kept = json.loads(path.read_text()) if path.exists() else {}
        self._done: dict[str, Any] = kept["cells"] if kept.get("code") == self._code else {}

    def __call__(self, name: str, *args: Any, **kwargs: Any) -> Outcome:
        """Returns the cached outcome of `train`, or trains; `name` stands for recipe and data."""
        key = key_of(name, *args, **kwargs)
        if key not in self._done:
            outcome = train(*args, **kwargs)
            self._done[key] = dataclasses.asdict(outcome)
            self._path.parent.mkdir(parents=True, exist_ok=True)
            beside = self._path.with_suffix(".part")
            beside.write_text(json.dumps({"code": self._code, "cells": self._done}, indent=1))
            beside.replace(self._path)
            print(f"{key}: {100 * outcome.accuracy:.2f}%", flush=True)
        return Outcome(**self._done[key])

    def forget(self) -> None:
        """Removes the file."""
        self._path.unlink(missing_ok=True)
