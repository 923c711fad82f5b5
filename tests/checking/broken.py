"""Factories that are no factories of trainers, and tasks that no check can compare."""

import sys
import uuid

import keras
import numpy as np

import ddl
from tests.checking.tiny import sgd


def made(strategy, accumulation_steps, rows=48, name="dense"):
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, name=name)])
    data = {"x": np.random.default_rng(0).normal(size=(rows, 6)), "label": np.arange(rows) % 3}
    return ddl.Trainer(
        ddl.Classification(model, input_name="x"),
        sgd(),
        data,
        global_batch_size=16,
        strategy=strategy,
        accumulation_steps=accumulation_steps,
    )


def raises(strategy, accumulation_steps):
    return 1 / 0


def ends(strategy, accumulation_steps):
    sys.exit("no such data set")


def nothing(strategy, accumulation_steps):
    made(strategy, accumulation_steps)


def one_argument(strategy):
    return made(strategy, 1)


def ignores_microbatches(strategy, accumulation_steps):
    return made(strategy, 1)


CONSTANT = 3


def random_names(strategy, accumulation_steps):
    return made(strategy, accumulation_steps, name=f"dense_{uuid.uuid4().hex}")


def three_rows(strategy, accumulation_steps):
    return made(strategy, accumulation_steps, rows=3)
