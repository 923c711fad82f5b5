"""Examples of all readers and of a stream, and training on them."""

import keras
import numpy as np
import tensorflow as tf

import ddl
from ddl.precision import set_precision
from tests.data import files
from tests.data.files import ROWS

X = np.random.default_rng(0).normal(size=(ROWS, 4))
Y = np.random.default_rng(1).integers(0, 3, ROWS)
SAVED, UPDATES = 4, 7  # of 8 rows: an epoch has three, the last of which has padding


def _of_epoch(epoch):
    rows = tf.data.Dataset.from_tensor_slices({"image": X, "label": Y})
    return rows.shuffle(ROWS, seed=epoch + 1).batch(5)


def _classification() -> ddl.Classification:
    x = keras.Input((4,))  # NaN where a mask is
    model = keras.Model(x, keras.layers.Dense(3)(keras.ops.nan_to_num(x)))
    return ddl.Classification(model, input_name="image")


KINDS = {"readers": files.all_readers, "stream": lambda _: ddl.data.stream(_of_epoch)}


def make_trainer(data, strategy, **options):
    task_of = files.linear_in_readers if isinstance(data, ddl.data.Source) else _classification
    set_precision("float64")
    keras.utils.set_random_seed(2)
    with strategy.scope():
        task, optimizer = task_of(), keras.optimizers.SGD(0.1, momentum=0.9)
    options |= {"global_batch_size": 8, "seed": 3}
    return ddl.Trainer(task, optimizer, data, strategy=strategy, **options)


def ends_of(trainer, updates=UPDATES):
    trainer.train(updates, progress=False)
    return trainer.model.get_weights()
