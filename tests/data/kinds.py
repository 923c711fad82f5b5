"""The same examples in each kind of data, and training on them."""

from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import ddl
from ddl.precision import set_precision

ROWS = 30
X = np.random.default_rng(0).normal(size=(ROWS, 4))
Y = np.random.default_rng(1).integers(0, 3, ROWS)
_NUMBERS = np.arange(ROWS)
UPDATES = 7  # of 8 rows: the second epoch begins with update 5, and update 4 has padding


class Items:
    """Examples by their index."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict:
        return {"image": X[index], "label": Y[index], "number": _NUMBERS[index]}


def _with_noise(item, seed):
    noise = tf.random.stateless_normal([4], seed, dtype=tf.float64)
    return {**item, "image": item["image"] + 0.1 * noise}


def _parsed(item, seed):
    numbers = tf.io.decode_raw(item["record"], tf.float64)
    example = {"image": numbers[:4], "label": tf.cast(numbers[4], tf.int64)}
    example["number"] = tf.cast(numbers[5], tf.int64)
    return {n: tf.ensure_shape(v, [4] if n == "image" else []) for n, v in example.items()}


def _records(folder: Path):
    path = folder / "rows.tfrecord"
    if not path.exists():
        with tf.io.TFRecordWriter(str(path)) as writer:
            for x, y, n in zip(X, Y, _NUMBERS, strict=True):
                writer.write(np.array([*x, y, n]).tobytes())
    return ddl.data.tf_records(str(path), decode=_parsed)


def _of_epoch(epoch):
    rows = tf.data.Dataset.from_tensor_slices({"image": X, "label": Y, "number": _NUMBERS})
    return rows.shuffle(ROWS, seed=epoch + 1).batch(7)


KINDS = {
    "arrays": lambda _: {"image": X, "label": Y, "number": _NUMBERS},
    "items": lambda _: Items(),
    "decoded": lambda _: ddl.data.Source(Items(), _with_noise),
    "records": _records,
    "stream": lambda _: ddl.data.stream(_of_epoch),
}


def data_of(kind: str, folder: Path):
    """Returns the examples as a kind of data, whose files lie in a folder."""
    return KINDS[kind](folder)


def make_trainer(data, strategy, **options):
    set_precision("float64")
    keras.utils.set_random_seed(2)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    task = ddl.Classification(model, input_name="image")
    options = {"global_batch_size": 8, "seed": 3, "eval_data": data, **options}
    return ddl.Trainer(task, optimizer, data, strategy=strategy, **options)


def ends_of(trainer, updates=UPDATES):
    trainer.train(updates, progress=False)
    return [*trainer.model.get_weights(), trainer.evaluate()["loss"]]
