"""Tasks with a step of their own, or with parameter groups."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import ddl
from ddl.optimizers import Group, ParameterGroups
from ddl.precision import set_precision

layers = keras.layers


def data(examples: int = 48) -> dict[str, np.ndarray]:
    """53 examples in batches of 16 leave one of five rows; 48 leave none."""
    random = np.random.default_rng(0)
    x = random.normal(size=(examples, 6))
    return {"x": x, "label": random.integers(0, 3, examples)}


def perceptron(inputs: int, outputs: int, **options: Any) -> keras.Model:
    hidden = [layers.Dense(8, "tanh", **options), layers.Dropout(0.3)]
    return keras.Sequential([keras.Input((inputs,)), *hidden, layers.Dense(outputs)])


class Classifier:
    """The loss of the tasks below."""

    model: keras.Model

    def per_example(self, features: dict[str, Any], training: bool) -> ddl.PerExample:
        logits = self.model(features["x"], training=training)
        loss = tf.nn.sparse_softmax_cross_entropy_with_logits(features["label"], logits)
        return ddl.PerExample(loss)


class Sam(Classifier):
    """Foret et al. 2021: the gradient at the worst point nearby, at the same draws."""

    def __init__(self) -> None:
        norm = layers.BatchNormalization()
        hidden = [layers.Dense(8), norm, layers.ReLU(), layers.Dropout(0.3), layers.Dense(3)]
        self.model = keras.Sequential([keras.Input((6,)), *hidden])

    def step(self, update: Any, batch: Any) -> None:
        up = update.gradients(self.per_example, batch)
        with update.moved(self.model, up * (0.05 / up.norm())):
            again = {"same_draws_as": up, "moves_statistics": False}
            sharp = update.gradients(self.per_example, batch, **again)
        update.apply(sharp)


class Grouped(Classifier):
    """No step: two parameter groups."""

    def __init__(self) -> None:
        hidden = layers.Dense(8, "tanh", kernel_regularizer=keras.regularizers.L2(0.01))
        backbone = keras.Sequential([keras.Input((6,)), hidden], name="backbone")
        self.model = keras.Sequential([keras.Input((6,)), backbone, layers.Dense(3, name="head")])


def groups() -> ParameterGroups:
    backbone = Group(momentum(0.05, 0.3), ["^backbone/"])
    return ParameterGroups({"backbone": backbone, "head": momentum(0.02, 0.1)})


def momentum(rate: float, decay: float | None = None) -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(rate, momentum=0.9, weight_decay=decay)


def two_optimizers() -> dict[str, keras.optimizers.Optimizer]:
    return {"generator": momentum(0.05), "discriminator": momentum(0.02)}


TASKS: dict[type, Callable[[], Any]] = {Sam: lambda: momentum(0.05), Grouped: groups}


def build(
    of_task: type,
    strategy: tf.distribute.Strategy,
    *,
    precision: str = "float64",
    examples: int = 53,
    change: Callable[[Any], None] = lambda task: None,
    **arguments: Any,
) -> ddl.Trainer:
    """Makes the trainer of one of `TASKS`, which `change` changes before the trainer sees it."""
    set_precision(precision)
    keras.utils.set_random_seed(7)
    floats = "float64" if precision == "float64" else "float32"
    values = {k: v.astype(floats) if v.dtype.kind == "f" else v for k, v in data(examples).items()}
    arguments = {"global_batch_size": 16, "strategy": strategy, "seed": 3, **arguments}
    with strategy.scope():
        task = of_task()
        change(task)
        return ddl.Trainer(task, TASKS[of_task](), values, **arguments)


def copies(trainer: ddl.Trainer) -> list[list[np.ndarray]]:
    """The copies on all replicas of the variables of layers, optimizers, averages and the task."""
    update = trainer._train_step
    averages = update.averages.variables if update.averages else []
    found = [*update._at_risk(), *averages]
    results = trainer.strategy.experimental_local_results
    return [[copy.numpy() for copy in results(variable)] for variable in found]
