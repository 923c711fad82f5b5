"""Accuracy of large batches for each recipe: python -m benchmarks.large_batch.

Each recipe trains on the same examples: 10 epochs of 60,000 digits, which are the 1,437 training
images included in ddl, shifted by up to a pixel. The test set is 5,000 such images made from the
360 held-out ones. The network is a small CNN with batch normalization. Momentum is 0.9 with
Nesterov's gradient, and the learning rate decays linearly to zero. A warm-up takes the first two
epochs. The rates were found on 240 validation images from the training set, each as the best of
five: SGD's 0.02 at batch 64, which the scaling rule alone takes to other batch sizes; LARS's 0.25
and LAMB's 0.04 at batch 1,024, scaled by the square root. Figures are means over three seeds, with
the largest deviation of a seed. A training that diverged counts as 0%. Trainings run
side by side, each on one thread.
"""

import gc
import math
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, NamedTuple

import keras
import numpy as np

import ddl
from benchmarks import harness
from benchmarks.harness import Cell, Options, Report, Table, Target
from ddl import distribution
from ddl.errors import TrainingDiverged
from ddl.optimizers import LAMB, LARS, LearningRate
from ddl.optimizers.learning_rate import ScalingRule

BATCHES, SEEDS, EPOCHS = (64, 1024, 4096), 3, 10
EXAMPLES, TEST_EXAMPLES = 60_000, 5_000


class Recipe(NamedTuple):
    """A recipe: the optimizer, its rate at a batch size, the rule for others, and the warm-up."""

    optimizer: Callable[[Any], keras.optimizers.Optimizer]
    rate: float
    base_batch: int
    scaling: ScalingRule
    warms_up: bool


def _sgd(rate: Any) -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(rate, momentum=0.9, nesterov=True)


def _lars(rate: Any) -> keras.optimizers.Optimizer:
    return LARS(rate, momentum=0.9, nesterov=True, trust_coefficient=0.02)


RECIPES = {
    "unscaled": Recipe(_sgd, 0.02, 64, "none", False),
    "linear": Recipe(_sgd, 0.02, 64, "linear", False),
    "linear, warm-up": Recipe(_sgd, 0.02, 64, "linear", True),
    "LARS, warm-up": Recipe(_lars, 0.25, 1024, "square_root", True),
    "LAMB, warm-up": Recipe(LAMB, 0.04, 1024, "square_root", True),
}
CHOSEN = "LARS, warm-up"  # the best at 1,024 on the validation images


def moved(images: np.ndarray, labels: np.ndarray, count: int, seed: int) -> tuple[Any, Any]:
    """Returns copies of images, each shifted by up to a pixel in each direction, interpolated.

    Args:
      images: uint8 [n, 8, 8, 1] from 0 to 16.
      labels: int [n].
      count: Number of copies; the copies of any two images differ by at most one.
      seed: Seed of the shifts and of the order.

    Returns:
      uint8 [count, 8, 8, 1] from 0 to 255, and the labels [count].
    """
    random = np.random.default_rng(seed)
    rounds = -(-count // len(images))
    which = np.concatenate([random.permutation(len(images)) for _ in range(rounds)])[:count]
    offset = random.uniform(-1, 1, (count, 2, 1, 1))
    whole = np.floor(offset).astype(int)
    part = offset - whole
    padded = np.pad(images[which, ..., 0] * 15.9375, ((0, 0), (2, 2), (2, 2)))
    pixel = np.arange(8) + 2
    result = np.zeros((count, 8, 8))
    for down in (0, 1):
        for across in (0, 1):
            rows = pixel[None, :, None] + whole[:, 0] + down
            columns = pixel[None, None, :] + whole[:, 1] + across
            share = (part if down else 1 - part)[:, 0] * (part if across else 1 - part)[:, 1]
            result += share * padded[np.arange(count)[:, None, None], rows, columns]
    return np.round(result).astype(np.uint8)[..., np.newaxis], labels[which]


def network() -> keras.Model:
    """Builds two convolutions and a dense layer."""
    sizes = {"blocks": ((16,), (32,)), "hidden_units": (64,), "padding": "same"}
    model = ddl.models.cnn((8, 8, 1), 10, **sizes, batch_normalization=True)
    for layer in model.layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.momentum = 0.9  # few updates: 0.99 would still show the initial values
    return model


def accuracy(recipe: Recipe, batch: int, seed: int, epochs: int, examples: int) -> float:
    """Trains once, and returns the accuracy on the test set in percent."""
    keras.utils.set_random_seed(seed)
    updates = epochs * math.ceil(examples / batch)
    warmup = updates // 5 if recipe.warms_up else 0
    rate = LearningRate(
        keras.optimizers.schedules.PolynomialDecay(recipe.rate, updates - warmup, 0.0),
        scaling=recipe.scaling,
        base_batch_size=recipe.base_batch,
        global_batch_size=batch,
        warmup_steps=warmup,
    )
    data = moved(*ddl.data.digits("train"), examples, 1)
    test = {"eval_data": moved(*ddl.data.digits("test"), TEST_EXAMPLES, 2), "seed": seed}
    with distribution.build_strategy("one_device").scope():
        task = ddl.Classification(network())
        given = {"global_batch_size": batch, **test}
        trainer = ddl.Trainer(task, recipe.optimizer(rate), data, **given)
    try:
        trainer.train(updates)
        found = 100 * trainer.evaluate()["accuracy"]
    except TrainingDiverged:
        found = 0.0
    del trainer
    keras.backend.clear_session()
    gc.collect()
    return found


def _cell(accuracies: list[float] | None) -> Cell:
    """Returns mean and largest deviation of the seeds' accuracies as text."""
    if accuracies is None:
        return "–"
    mean = float(np.mean(accuracies))
    return f"{mean:.2f} ± {max(abs(each - mean) for each in accuracies):.2f}"


def measure(options: Options) -> Report:
    """Trains all recipes at all batch sizes; at 64 only the unscaled one, equal to the linear."""
    seeds, epochs, examples = (1, 1, 8192) if options.quick else (SEEDS, EPOCHS, EXAMPLES)
    chosen = options.chosen(RECIPES)
    runs = [(name, batch) for name in chosen for batch in BATCHES[name != "unscaled" :]]
    os.environ["TF_NUM_INTRAOP_THREADS"] = "1"  # of each process
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        trainings = {
            (name, batch): [
                pool.submit(accuracy, RECIPES[name], batch, seed, epochs, examples)
                for seed in range(seeds)
            ]
            for name, batch in runs
        }
        found = {run: [each.result() for each in of_run] for run, of_run in trainings.items()}
    means = {run: float(np.mean(accuracies)) for run, accuracies in found.items()}
    rows = [[name, *(_cell(found.get((name, batch))) for batch in BATCHES)] for name in chosen]
    targets = []
    for batch in BATCHES[1:]:
        if {("unscaled", BATCHES[0]), (CHOSEN, batch)} <= means.keys():
            gap = means["unscaled", BATCHES[0]] - means[CHOSEN, batch]
            what = f"points below batch {BATCHES[0]} at {batch:,}, {CHOSEN}"
            targets.append(Target(what, gap, 0.5, "at most"))
    columns = ["recipe", *(f"{batch:,}" for batch in BATCHES)]
    title = "Test accuracy, %, by global batch size"
    return Report([Table(title, columns, rows)], targets)


if __name__ == "__main__":
    harness.main(measure)
