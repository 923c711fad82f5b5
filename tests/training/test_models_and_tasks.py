"""Each model with its task: the same on several replicas and microbatches, and resumed."""

import functools

import keras
import numpy as np
import pytest

import ddl
from ddl.precision import set_precision
from tests.conftest import make_strategy

RANDOM = np.random.default_rng(0)
EXAMPLES, BATCH, STEPS = 20, 8, 5  # the third batch has padding

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
    "several": {"image": IMAGES, "label": RANDOM.integers(0, 2, (EXAMPLES, 3))},
}


def recurrent():
    layers = [
        keras.layers.Embedding(11, 4),
        ddl.layers.LSTM(5, dropout=0.3, return_sequences=True),
        keras.layers.Dense(11),
    ]
    return keras.Sequential([keras.Input((6,), dtype="int64"), *layers])


def small_mlp(outputs=3):
    return ddl.models.mlp((8, 8, 1), outputs, hidden_units=(5,))


CASES = {
    "gpt": (
        "tokens",
        lambda: ddl.LanguageModel(ddl.models.gpt(11, 6, width=8, heads=2, blocks=1, dropout=0.2)),
    ),
    "lstm": ("tokens", lambda: ddl.LanguageModel(recurrent())),
    "vit": (
        "images",
        lambda: ddl.Classification(
            ddl.models.vit((8, 8, 1), 3, patch=4, width=8, heads=2, blocks=1, dropout=0.2)
        ),
    ),
    "unet": (
        "pixels",
        lambda: ddl.Segmentation(
            ddl.models.unet((8, 8, 1), 4, widths=(4, 6), normalized=False),
            ignored=3,
            class_weights=[1, 2, 0.5, 1],
        ),
    ),
    "table": (
        "tables",
        lambda: ddl.Regression(
            ddl.models.table_mlp(1, numbers=3, categories={"colour": 4}, hidden_units=(5,)),
            loss="huber",
        ),
    ),
    "several": ("several", lambda: ddl.MultiLabel(small_mlp(), positive_weights=[1, 2, 3])),
    "distillation": (
        "images",
        lambda: ddl.Distillation(ddl.Classification(small_mlp()), small_mlp()),
    ),
}
# Moments are those of a microbatch.
NORMALIZED = {
    "unet, normalized": (
        "pixels",
        lambda: ddl.Segmentation(ddl.models.unet((8, 8, 1), 4, widths=(4, 6))),
    ),
    "wide_resnet": (
        "images",
        lambda: ddl.Classification(
            ddl.models.wide_resnet((8, 8, 1), 3, depth=10, widening=1, dropout=0.2)
        ),
    ),
}


def make_trainer(name, strategy, microbatches=1):
    set_precision("float64")
    keras.utils.set_random_seed(1)
    data, make_task = {**CASES, **NORMALIZED}[name]
    with strategy.scope():
        return ddl.Trainer(
            make_task(),
            keras.optimizers.SGD(0.05, momentum=0.9),
            DATA[data],
            global_batch_size=BATCH,
            eval_data=DATA[data],
            accumulation_steps=microbatches,
            seed=3,
        )


def outcome(trainer):
    figures = trainer.train(STEPS, progress=False)
    weights = [v.numpy() for v in [*trainer.model.variables, *trainer.optimizer.variables]]
    return figures, trainer.evaluate(), weights


@functools.cache
def on_one_device(name):
    return outcome(make_trainer(name, make_strategy("one_device", 1)))


@pytest.mark.usefixtures("rows_checked_on_one_device")
@pytest.mark.parametrize("name", [*CASES, *NORMALIZED])
def test_two_replicas_compute_what_one_device_computes(name):
    microbatches = 1 if name in NORMALIZED else 2
    ours = outcome(make_trainer(name, make_strategy("mirrored", 2), microbatches))
    expected = on_one_device(name)
    for one, other in zip(ours[:2], expected[:2], strict=True):
        assert one == pytest.approx(other, abs=1e-10)
    for value, other in zip(ours[2], expected[2], strict=True):
        np.testing.assert_allclose(value, other, rtol=0, atol=1e-10)
