"""Adagrad moves the same rows whatever the layout, and whatever looks them up."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.precision import set_precision
from tests.conftest import make_strategy

ROWS, BATCH, UPDATES = 9, 8, 4


@keras.saving.register_keras_serializable("test")
class Within(keras.layers.Embedding):
    """Looks rows up within a function of its own, where they are not found."""

    def call(self, inputs):
        return tf.function(lambda: tf.gather(tf.identity(self.embeddings), inputs))()


@keras.saving.register_keras_serializable("test")
class AsProduct(keras.layers.Embedding):
    """Looks rows up by a matrix product, so that the gradient is dense."""

    def call(self, inputs):
        return tf.one_hot(inputs, self.input_dim, dtype=self.compute_dtype) @ self.embeddings


class Scores:
    """A sum of what three equal tables of fewer rows than lookups give."""

    def __init__(self):
        ids = keras.Input((), dtype="int64")
        kinds = keras.layers.Embedding, Within, AsProduct
        rows = [kind(ROWS, 2, embeddings_initializer="ones")(ids) for kind in kinds]
        outputs = keras.layers.Dense(1, kernel_initializer="ones")(keras.layers.Add()(rows))
        self.model = keras.Model(ids, outputs)

    def per_example(self, features, training):
        outputs = self.model(features["ids"], training=training)[:, 0]
        return ddl.PerExample((outputs - features["y"]) ** 2)


@functools.cache
def examples():
    """Rows of which later batches look up fewer; row 4 by an example of weight 0 alone."""
    few = np.arange((UPDATES - 1) * BATCH) % 4
    ids = np.concatenate([[0, 1, 2, 3, 4, 5, 6, 7], few])
    y = np.random.default_rng(0).normal(size=len(ids))
    return {"ids": ids, "y": y, "weight": np.where(ids == 4, 0, 1).astype("f4")}


@functools.cache
def trained(where, accumulation_steps):
    """The optimizer, and the three tables after each of two numbers of updates."""
    set_precision("float64")
    keras.utils.set_random_seed(1)
    strategy = make_strategy(*where)
    with strategy.scope():
        task, optimizer = Scores(), keras.optimizers.Adagrad(0.1)
        trainer = ddl.Trainer(
            task,
            optimizer,
            ddl.data.Source(dict(**examples())),
            global_batch_size=BATCH,
            strategy=strategy,
            seed=0,
            accumulation_steps=accumulation_steps,
        )
        made = []
        for updates in (1, UPDATES - 1):
            trainer.train(updates)
            tables = [v for v in task.model.trainable_variables if v.shape[0] == ROWS]
            made.append([table.numpy() for table in tables])
    return optimizer, tables, np.array(made)


@pytest.mark.parametrize(
    ("where", "accumulation_steps"),
    [(("one_device", 1), 4), (("mirrored", 2), 2)],
    ids=str,
)
def test_rows_do_not_depend_on_microbatches_and_replicas(where, accumulation_steps):
    _, _, expected = trained(("one_device", 1), 1)
    _, _, tables = trained(where, accumulation_steps)
    np.testing.assert_allclose(tables, expected, rtol=0, atol=1e-12)


def test_rows_without_gradient_stay_in_tables_of_each_kind():
    _, _, tables = trained(("one_device", 1), 1)
    for of_kind in tables.transpose(1, 0, 2, 3)[1:]:
        np.testing.assert_allclose(of_kind, tables[:, 0], rtol=0, atol=1e-12)
    np.testing.assert_array_equal(tables[:, :, [4, 8]], 1)
    assert np.all(tables[1][:, [0, 1, 2, 3, 5, 6, 7]] != 1)
