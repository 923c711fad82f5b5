"""A model that looks vectors up, in one table or in one of several parts, with the same numbers."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import ddl
from ddl.precision import set_precision

ROWS, WIDTH, WORDS, EXAMPLES, BATCH = 103, 4, 5, 131, 32

OPTIMIZERS = {
    "SGD": lambda: keras.optimizers.SGD(0.5),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.05),
}


def data() -> dict[str, np.ndarray]:
    """Returns words, of which small numbers are frequent, with labels; 131 examples."""
    random = np.random.default_rng(2)
    words = np.minimum(random.geometric(0.05, (EXAMPLES, WORDS)) - 1, ROWS - 1)
    words[:, 0] = random.integers(0, ROWS, EXAMPLES)
    return {"words": words, "label": random.integers(0, 3, EXAMPLES)}


def task(parts: int) -> ddl.Classification:
    """Returns the task; with `parts` 0 its table is Keras's Embedding."""
    words = keras.Input((WORDS,), dtype="int64", name="words")
    table: Any = keras.layers.Embedding(ROWS, WIDTH, name="table")
    if parts:
        table = ddl.layers.PartitionedEmbedding(
            ROWS, WIDTH, max_parts=parts, min_part_bytes=16, name="table"
        )
    x = keras.layers.Flatten()(table(words))
    model = keras.Model(words, keras.layers.Dense(3, name="outputs")(x))
    return ddl.Classification(model, input_name="words")


def make_trainer(
    strategy: tf.distribute.Strategy,
    parts: int,
    optimizer: str = "SGD",
    precision: Any = "float64",
    train_data: Any = None,
    **arguments: Any,
) -> ddl.Trainer:
    """Builds a trainer whose initial numbers are the same for any number of parts."""
    set_precision(precision)
    with strategy.scope():
        trainer = ddl.Trainer(
            task(parts),
            OPTIMIZERS[optimizer](),
            data() if train_data is None else train_data,
            global_batch_size=BATCH,
            seed=5,
            **arguments,
        )
    random = np.random.default_rng(3)
    assign_table(trainer.model, random.normal(0, 0.1, (ROWS, WIDTH)))
    outputs = trainer.model.get_layer("outputs")
    outputs.kernel.assign(random.normal(0, 0.5, outputs.kernel.shape))
    return trainer


def assign_table(model: keras.Model, whole: np.ndarray) -> None:
    """Assigns all vectors of the model."""
    layer = model.get_layer("table")
    if isinstance(layer, keras.layers.Embedding):
        layer.embeddings.assign(whole)
    else:
        layer.assign(whole)


def whole(variables: list[keras.Variable], parts: int) -> np.ndarray:
    """Returns the whole table of parts, of the weights or of a slot."""
    table = np.empty((ROWS, WIDTH))
    for number, variable in enumerate(variables):
        table[number::parts] = np.array(variable)
    return table


def results(trainer: ddl.Trainer, parts: int, steps: int = 20) -> dict[str, np.ndarray]:
    """Trains; returns losses, the table, its slots, and the other weights."""
    losses = [trainer.train(1)["loss"] for _ in range(steps)]
    number = max(parts, 1)
    slots = [v for v in trainer.optimizer.variables if tuple(v.shape[1:]) == (WIDTH,)]
    found = {
        "losses": np.array(losses),
        "table": whole(trainer.model.get_layer("table").weights, number),
        "kernel": np.array(trainer.model.get_layer("outputs").kernel),
    }
    return found | ({"slots": whole(slots, number)} if slots else {})


def largest(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> dict[str, float]:
    """Returns the largest absolute differences."""
    assert ours.keys() == theirs.keys()
    return {name: float(np.max(np.abs(ours[name] - theirs[name]))) for name in ours}
