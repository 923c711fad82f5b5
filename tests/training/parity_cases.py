"""Cases whose results must be the same on one device and on several; the benchmark shares them.

Each case trains for 20 updates from one seed. `differences` compares all results of a run: the
logged losses, weights, slots of the optimizer, averages of the weights and moving moments.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import ddl
from ddl.precision import set_precision

STEPS = 20
_BATCH = 32


def _data(examples: int, **features: np.ndarray) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    labels = random.integers(0, 3, examples)
    images = random.integers(0, 56, (examples, 6, 6, 1)) + 100 * labels.reshape(-1, 1, 1, 1)
    return {"image": images.astype("u1"), "label": labels, **features}


UNEVEN = _data(131)  # a prime: the last batch of an epoch has three rows
WEIGHED = _data(131, weight=np.random.default_rng(1).uniform(0, 3, 131).astype("f4"))


def mlp(**arguments: Any) -> ddl.Classification:
    return ddl.Classification(ddl.models.mlp((6, 6, 1), 3, hidden_units=(16,), **arguments))


def cnn() -> ddl.Classification:
    model = ddl.models.cnn((6, 6, 1), 3, blocks=[(4,)], hidden_units=[8], batch_normalization=True)
    return ddl.Classification(model)


def noisy() -> ddl.Classification:
    layers = keras.layers
    return ddl.Classification(
        keras.Sequential(
            [
                keras.Input((6, 6, 1)),
                keras.layers.Rescaling(1 / 255),
                layers.GaussianNoise(0.1),
                layers.SpatialDropout2D(0.3),
                keras.layers.Flatten(),
                keras.layers.Dense(16, "selu"),
                layers.AlphaDropout(0.2),
                layers.GaussianDropout(0.2),
                layers.Dropout(0.2, noise_shape=(1, 16)),
                layers.Dropout(0.2),
                keras.layers.Dense(3),
            ]
        )
    )


class Tagging:
    """A task with a class for each token, a mask and sparse gradients of the embedding."""

    def __init__(self) -> None:
        words = keras.Input((5,), dtype="int64", name="words")
        x = keras.layers.Embedding(7, 4, name="table")(words)
        x = keras.layers.Dropout(0.2)(x)
        self.model = keras.Model(words, keras.layers.Dense(3)(x))

    def per_example(self, features: dict[str, Any], training: bool) -> ddl.PerExample:
        logits = self.model(features["words"], training=training)
        loss = tf.nn.sparse_softmax_cross_entropy_with_logits(features["tags"], logits)
        mask = tf.sequence_mask(features["length"], 5, loss.dtype)
        return ddl.PerExample(loss, weight=mask)


def rich() -> ddl.Classification:
    """Synchronized normalization, dropout, augmentation and penalties in one model."""
    model = ddl.models.cnn(
        (6, 6, 1),
        3,
        blocks=((4,),),
        hidden_units=(8,),
        hidden_dropout=0.2,
        batch_normalization=True,
    )
    for variable in model.trainable_variables:
        variable.regularizer = keras.regularizers.L2(0.01)
    augmentations = [keras.layers.RandomFlip("horizontal"), ddl.layers.RandomShift(1, 1)]
    return ddl.Classification(model, augmentations=augmentations)


def _sentences() -> dict[str, np.ndarray]:
    random = np.random.default_rng(2)
    return {
        "words": random.integers(0, 7, (131, 5)),
        "tags": random.integers(0, 3, (131, 5)),
        "length": random.integers(0, 6, 131),
        "weight": random.uniform(0, 2, 131).astype("f4"),
    }


def sgd(**arguments: Any) -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.05, momentum=0.9, **arguments)


@dataclasses.dataclass(frozen=True)
class Case:
    """The configuration of a run, and `reference`, the overrides of its run on one device."""

    task: Callable[[], Any] = mlp
    optimizer: Callable[[], keras.optimizers.Optimizer] = sgd
    data: Mapping[str, np.ndarray] = dataclasses.field(default_factory=lambda: UNEVEN)
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    reference: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    in_float32: bool = True  # False if too ill-conditioned for float32


CASES: dict[str, Case] = {
    "131 examples in batches of 32": Case(),
    "BatchNormalization, accumulation 2": Case(cnn, arguments={"accumulation_steps": 2}),
}


# Cases that combine the others; tests run them under every strategy.
COMBINED = {
    "combined: BatchNormalization, accumulation, weights, clipping, decay": Case(
        task=rich,
        data=WEIGHED,
        optimizer=lambda: sgd(weight_decay=0.01),
        arguments={"accumulation_steps": 2, "clip_norm": 0.05},
        in_float32=False,
    ),
    "combined: sparse gradients, weights of tokens, clipping, AdamW": Case(
        task=Tagging,
        data=_sentences(),
        optimizer=lambda: keras.optimizers.AdamW(0.01),
        arguments={"clip_norm": 0.05},
    ),
    "combined: noise, accumulation, uneven batches made on the host, Lamb": Case(
        task=noisy,
        optimizer=lambda: keras.optimizers.Lamb(0.01),
        arguments={"data_on_device": False, "clip_norm": 0.05, "accumulation_steps": 4},
        reference={"accumulation_steps": 1},
    ),
}
CASES |= COMBINED


def make_trainer(case: Case, strategy: tf.distribute.Strategy, precision: str, **arguments: Any):
    """Builds a trainer that also averages the weights, with a fixed seed."""
    set_precision(precision)
    keras.utils.set_random_seed(3)
    with strategy.scope():
        return ddl.Trainer(
            case.task(),
            case.optimizer(),
            dict(case.data),
            global_batch_size=_BATCH,
            seed=5,
            weight_average=ddl.ExponentialMovingAverage(0.9),
            **{**case.arguments, **arguments},
        )


def figures(trainer: ddl.Trainer) -> dict[str, list[np.ndarray]]:
    """Trains; returns all results that must not depend on the devices, of every replica."""
    losses = [trainer.train(1)["loss"] for _ in range(STEPS)]
    kinds = {
        "weights": trainer.model.trainable_variables,
        "slots": trainer.optimizer.variables,
        "moments": trainer.model.non_trainable_variables,
        "averages": trainer.averages.variables,
    }
    values = {"losses": [np.array(losses)]}
    with trainer.evaluation_weights(averaged=False):
        for kind, variables in kinds.items():
            for place, variable in enumerate(variables):
                own = variable.value if isinstance(variable, keras.Variable) else variable
                copies = trainer.strategy.experimental_local_results(own)
                values[f"{kind} {place}"] = [copy.numpy() for copy in copies]
    return values


@functools.cache
def reference(name: str, precision: str) -> dict[str, list[np.ndarray]]:
    """Returns the figures of one device."""
    case = CASES[name]
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    return figures(make_trainer(case, strategy, precision, **case.reference))


def differences(name: str, strategy: tf.distribute.Strategy, precision: str) -> dict[str, float]:
    """Returns the largest absolute difference from one device, by kind."""
    ours = figures(make_trainer(CASES[name], strategy, precision))
    return largest_differences(ours, reference(name, precision))


def largest_differences(
    ours: Mapping[str, Any], reference: Mapping[str, list[np.ndarray]]
) -> dict[str, float]:
    """Returns the largest absolute difference of two runs' figures, by kind."""
    largest: dict[str, float] = {}
    for key, (expected,) in reference.items():
        kind = key.partition(" ")[0]
        if expected.dtype.kind == "f":
            difference = float(np.max(np.abs(np.array(ours[key]) - expected), initial=0.0))
            # A NaN counts as an infinite difference.
            largest[kind] = max(largest.get(kind, 0.0), np.nan_to_num(difference, nan=np.inf))
    return largest


def assert_small(name: str, largest: Mapping[str, float], bound: float) -> None:
    """Checks that the largest differences of a run are within a bound, and that none is missing."""
    assert {"losses", "weights", "slots", "averages"} <= largest.keys()
    assert ("moments" in largest) == ("BatchNormalization" in name)
    assert max(largest.values()) <= bound, largest
