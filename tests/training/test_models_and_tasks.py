"""Each model with its task: the same on several replicas and microbatches, and resumed."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

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
    "documents": {"token": TOKENS, "length": RANDOM.integers(1, 8, EXAMPLES)},
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


class OfTokens:
    """A loss for each of several tokens of an example, without weights."""

    def __init__(self):
        self.model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4)])

    def per_example(self, features, training):
        outputs = self.model(features["x"], training=training)
        return ddl.PerExample(tf.square(outputs - features["y"]))


@pytest.mark.parametrize("examples", [16, 19])  # batches that are all full, or one with padding
@pytest.mark.parametrize("where", [("one_device", 1, 1), ("mirrored", 2, 2)])
def test_losses_of_tokens_are_divided_by_the_number_of_tokens(where, examples):
    """As a loop without ddl computes it: parity between devices cannot show a common factor."""
    set_precision("float64")
    random = np.random.default_rng(0)
    data = {"x": random.normal(size=(examples, 3)), "y": random.normal(size=(examples, 4))}
    keras.utils.set_random_seed(1)
    with make_strategy(*where[:2]).scope():
        trainer = ddl.Trainer(
            OfTokens(),
            keras.optimizers.SGD(0.5),
            data,
            global_batch_size=8,
            accumulation_steps=where[2],
            shuffle=False,
        )
    keras.utils.set_random_seed(1)
    task, optimizer = OfTokens(), keras.optimizers.SGD(0.5)
    for first in range(0, examples, 8):
        rows = {name: values[first : first + 8] for name, values in data.items()}
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(task.per_example(rows, True).loss)
        variables = task.model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)
    trainer.train(-(-examples // 8))
    for one, other in zip(trainer.model.variables, task.model.variables, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=0, atol=1e-12)


def test_the_noise_scale_of_tokens_is_that_of_examples():
    """Losses of several tokens, and their mean as the loss of the example."""

    class OfExamples(OfTokens):
        def per_example(self, features, training):
            output = super().per_example(features, training)
            return output._replace(loss=tf.reduce_mean(output.loss, axis=1))

    set_precision("float64")
    random = np.random.default_rng(0)
    data = {"x": random.normal(size=(16, 3)), "y": random.normal(size=(16, 4))}
    figures = []
    for task in (OfTokens, OfExamples):
        keras.utils.set_random_seed(1)
        trainer = ddl.Trainer(
            task(),
            keras.optimizers.SGD(0.1),
            data,
            global_batch_size=8,
            accumulation_steps=4,
            seed=1,
            gradient_noise_scale=ddl.GradientNoiseScale(),
        )
        figures.append(trainer.train(4))
    assert figures[0]["gradient_noise_scale"] > 0
    assert figures[0] == pytest.approx(figures[1], rel=1e-10)
