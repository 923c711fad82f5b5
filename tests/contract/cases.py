"""The configurations whose training must equal the plain loop, and their runs on devices."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import ddl
from tests.contract import builders, plain_loop

BATCH = 32
UPDATES = 7  # the fifth batch of an epoch of 131 examples has three rows; two of the next epoch

layers = keras.layers
Where = tuple[str, int]
Figures = dict[str, list[np.ndarray]]

_RANDOM = np.random.default_rng(0)


def _images(examples: int, **features: np.ndarray) -> dict[str, np.ndarray]:
    labels = _RANDOM.integers(0, 3, examples)
    images = _RANDOM.normal(size=(examples, 5, 5, 1)) + labels.reshape(-1, 1, 1, 1)
    return {"image": images, "label": labels, **features}


def _weights(examples: int) -> np.ndarray:
    weight = _RANDOM.uniform(0.5, 3, examples).astype("f4")
    weight[::7] = 0
    return weight


def _numbers(examples: int) -> dict[str, np.ndarray]:
    inputs = _RANDOM.normal(size=(examples, 4))
    return {"x": inputs, "y": np.tanh(inputs @ _RANDOM.normal(size=(4, 2)))}


def _sentences(examples: int) -> dict[str, np.ndarray]:
    return {
        "words": _RANDOM.integers(0, 50, (examples, 5)),
        "tags": _RANDOM.integers(0, 3, (examples, 5)),
        "length": _RANDOM.integers(0, 6, examples),
        "weight": _weights(examples),
    }


IMAGES, OTHER_IMAGES = (_images(n, weight=_weights(n)) for n in (131, 75))
NUMBERS, UNEVEN_NUMBERS, OTHER_NUMBERS = (_numbers(n) for n in (128, 131, 75))
SENTENCES, OTHER_SENTENCES = _sentences(131), _sentences(75)


def cnn() -> keras.Model:
    l2, normalization = keras.regularizers.L2(0.05), layers.BatchNormalization(momentum=0.9)
    hidden = [layers.Conv2D(2, 3, kernel_regularizer=l2, use_bias=False), normalization]
    output = [layers.Activation("relu"), layers.Flatten(), layers.Dense(3)]
    return keras.Sequential([keras.Input((5, 5, 1)), *hidden, *output])


def mlp(*hidden: keras.layers.Layer) -> keras.Model:
    hidden = hidden or (layers.Activation("tanh"),)
    return keras.Sequential([keras.Input((4,)), layers.Dense(5), *hidden, layers.Dense(2)])


def normalized_mlp() -> keras.Model:
    return mlp(layers.BatchNormalization(momentum=0.9))


def tagger() -> keras.Model:
    inputs = keras.Input((5,), dtype="int64")
    return keras.Sequential([inputs, layers.Embedding(50, 4), layers.Dense(3)])


def of_images(model, features, training):
    logits, labels = model(features["image"], training=training), features["label"]
    loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    return loss, {"accuracy": tf.argmax(logits, 1) == labels}, None


def of_numbers(model, features, training):
    error = model(features["x"], training=training) - features["y"]
    loss = tf.reduce_mean(error**2, axis=1)
    return loss, {"mean_absolute_error": tf.reduce_mean(tf.abs(error), axis=1)}, None


def of_tokens(model, features, training):
    logits, tags = model(features["words"], training=training), features["tags"]
    loss = tf.nn.sparse_softmax_cross_entropy_with_logits(tags, logits)
    right = tf.cast(tf.argmax(logits, -1) == tags, loss.dtype)
    return loss, {"right": right}, tf.sequence_mask(features["length"], 5, loss.dtype)


class Tagging:
    """A task of a user's: a loss for each token, and a mask."""

    def __init__(self, model: keras.Model) -> None:
        self.model = model

    def per_example(self, features: dict[str, Any], training: bool) -> ddl.PerExample:
        return ddl.PerExample(*of_tokens(self.model, features, training))

    def predict(self, features: dict[str, Any]) -> tf.Tensor:
        return self.model(features["words"], training=False)


def regression(model: keras.Model) -> ddl.Regression:
    return ddl.Regression(model, input_name="x", label_name="y")


@dataclasses.dataclass(frozen=True)
class Case:
    """A training run, for ddl and for the plain loop.

    Attributes:
      model: Makes the model.
      task: Makes ddl's task of the model.
      per_example: What the task computes, without ddl.
      data: Training data, and `others`, the data of evaluations.
      optimizer: Makes the optimizer.
      inputs: Name of the feature that the model reads.
      rule: Makes what the optimizer computes; None: Keras applies it outside of any strategy.
      arguments: Arguments of `ddl.Trainer`.
      as_dataset: Whether ddl gets the data as a `tf.data.Dataset`.
      skipped: Numbers of batches that ddl must skip.
    """

    model: Callable[[], keras.Model]
    task: Callable[[keras.Model], Any]
    per_example: plain_loop.PerExample
    data: Mapping[str, np.ndarray]
    others: Mapping[str, np.ndarray]
    optimizer: Callable[[], keras.optimizers.Optimizer]
    inputs: str
    rule: Callable[[], plain_loop.Rule] | None = None
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    as_dataset: bool = False
    skipped: Sequence[int] = ()


def _poisoned() -> dict[str, np.ndarray]:
    """Returns data of which batch 2 overflows, in one of the last rows."""
    labels = UNEVEN_NUMBERS["y"].copy()
    labels[2 * BATCH + 30, 0] = 1.7e308
    return {**UNEVEN_NUMBERS, "y": labels}


def _adamw() -> keras.optimizers.Optimizer:
    return keras.optimizers.AdamW(0.05, weight_decay=0.125)


_NUMBERS = Case(
    *(mlp, regression, of_numbers, NUMBERS, OTHER_NUMBERS),
    optimizer=lambda: keras.optimizers.SGD(0.125, momentum=0.875),
    inputs="x",
)

# Momenta and decays are exact in float32, to which Keras rounds them.
CASES: dict[str, Case] = {
    # The clip bites at some updates and not at others: a wrong scale of the gradient shows.
    "images": Case(
        *(cnn, ddl.Classification, of_images, IMAGES, OTHER_IMAGES),
        optimizer=lambda: keras.optimizers.SGD(0.125, momentum=0.875, weight_decay=0.125),
        inputs="image",
        arguments={
            "accumulation_steps": 2,
            "clip_norm": 0.5,
            "weight_average": ddl.ExponentialMovingAverage(0.7),
        },
    ),
    "tokens": Case(
        *(tagger, Tagging, of_tokens, SENTENCES, OTHER_SENTENCES),
        optimizer=lambda: keras.optimizers.SGD(0.5),
        inputs="words",
        arguments={"clip_norm": 0.2},
    ),
    "numbers": replace(_NUMBERS, arguments={"accumulation_steps": 4}, as_dataset=True),
    "a skipped update": replace(
        _NUMBERS,
        model=normalized_mlp,
        data=_poisoned(),
        arguments={
            "loss_scale": ddl.LossScale(1024.0, growth_interval=None),
            "weight_average": ddl.ExponentialMovingAverage(0.7, warm_up=False),
        },
        skipped=[2, 7],
    ),
}


def _optimized(optimizer: Callable[[], Any], rule: Any = None, **arguments: Any) -> Case:
    data = {"data": UNEVEN_NUMBERS, "arguments": arguments}
    return replace(_NUMBERS, optimizer=optimizer, rule=rule, **data)


# Cases for which one strategy stands.
ON_TWO: dict[str, Case] = {
    "AdamW": _optimized(_adamw),
    "AdamW, each replica with slots of its own": _optimized(_adamw, shard_optimizer_state=True),
    "LARS": _optimized(
        lambda: ddl.optimizers.LARS(0.125, 0.875, weight_decay=0.125, trust_coefficient=0.5),
        lambda: plain_loop.Lars(0.125, momentum=0.875, decay=0.125, trust=0.5),
    ),
    "LAMB": _optimized(
        lambda: ddl.optimizers.LAMB(0.05, weight_decay=0.125), lambda: plain_loop.Lamb(0.05, 0.125)
    ),
    # Normalization would spread an overflow to all replicas' gradients.
    "an overflow on one replica": replace(
        CASES["a skipped update"], model=mlp, arguments={"loss_scale": ddl.LossScale(1024.0)}
    ),
}


ALL = CASES | ON_TWO


def figures(case: Case, where: Where, evaluates: bool) -> Figures:
    """Trains with ddl; returns all that must not depend on the devices, of each replica."""
    data, make = dict(case.data), (lambda: case.task(case.model()), case.optimizer)
    data = tf.data.Dataset.from_tensor_slices(data) if case.as_dataset else data
    options = {"global_batch_size": BATCH, **case.arguments}
    if evaluates:
        options["eval_data"] = dict(case.others)
    trainer = builders.make_trainer(make, data, where, **options)
    found = _by_name("training", [trainer.train(1, progress=False) for _ in range(UPDATES)])
    found |= _weights_of(trainer, "weights", averaged=False)
    if "weight_average" in case.arguments:
        found |= _weights_of(trainer, "averages", averaged=True)
    if evaluates:
        found |= _by_name("evaluation", [trainer.evaluate()])
        found |= _by_name("evaluation, not averaged", [trainer.evaluate(averaged=False)])
        inputs = {case.inputs: case.others[case.inputs]}
        found["evaluation: predictions"] = [trainer.predict(inputs)]
    return found


def _by_name(kind: str, rows: Sequence[Mapping[str, float]]) -> Figures:
    return {f"{kind}: {name}": [np.array([row[name] for row in rows])] for name in rows[0]}


def _weights_of(trainer: ddl.Trainer, kind: str, averaged: bool) -> Figures:
    copies = trainer.strategy.experimental_local_results
    with trainer.evaluation_weights(averaged=averaged):
        return {
            f"{kind}: {number}": [copy.numpy() for copy in copies(v.value)]
            for number, v in enumerate(trainer.model.weights)
        }


@functools.cache
def expected(name: str) -> tuple[Figures, plain_loop.Loop]:
    """Returns the same figures of the plain loop."""
    case = ALL[name]
    (model,) = builders.build(case.model)
    rule = case.rule() if case.rule else plain_loop.of_keras(case.optimizer())
    average = case.arguments.get("weight_average")
    loop = plain_loop.Loop(
        *(model, case.per_example, case.data, BATCH, rule),
        microbatches=case.arguments.get("accumulation_steps", 1),
        clip_norm=case.arguments.get("clip_norm"),
        average=average and (average.decay, average.warm_up),
        skipped=case.skipped,
    )
    found = _by_name("training", loop.train(UPDATES))
    found |= {f"weights: {number}": [v.numpy()] for number, v in enumerate(model.weights)}
    plain = [plain_loop.evaluate(model, case.per_example, case.others)]
    found |= _by_name("evaluation, not averaged", plain)
    if average:
        found |= {f"averages: {n}": [value] for n, value in enumerate(loop.averages)}
        model.set_weights(loop.averages)
        plain = [plain_loop.evaluate(model, case.per_example, case.others)]
    found |= _by_name("evaluation", plain)
    found["evaluation: predictions"] = [model(case.others[case.inputs], training=False).numpy()]
    return found, loop


def check_parity(name: str, where: Where, evaluates: bool = True) -> None:
    """Raises AssertionError unless ddl computes what the plain loop computes, on each replica."""
    ours, theirs = figures(ALL[name], where, evaluates), expected(name)[0]
    compared = [figure for figure in theirs if evaluates or not figure.startswith("evaluation")]
    distances = {
        figure: max(np.max(np.abs(own - theirs[figure][0])) for own in ours[figure])
        for figure in compared
    }
    wrong = {figure: distance for figure, distance in distances.items() if not distance <= 1e-10}
    assert not wrong, wrong
