"""Each reader with small files in its true format, of 21 examples, and one task for all."""

import functools
from pathlib import Path

import keras
import numpy as np
import pandas
import tensorflow as tf

import ddl
from tests.data.readers import test_image_folder, test_imagenet, test_records

ROWS = 21
LENGTH = 8  # tokens of a row
NUMBERS = 300  # of an example that a trainer reads; with so many, examples are decoded one by one
_LABEL = {"label": tf.io.FixedLenFeature([], tf.int64)}


class _Refilling:
    array = np.zeros(1)  # of each item, one after the other

    def __len__(self):
        return ROWS

    def __getitem__(self, number):
        self.array[:] = np.sqrt(number)
        return {"x": self.array}


def write(folder: Path) -> None:
    """Writes the files of all readers to an empty folder."""
    numbers, third = range(ROWS), ROWS // 3
    (folder / "imagenet").mkdir()
    # Bytes that end with zeros are kept.
    records = [test_records.example({"image": bytes([n, 0]), "label": n}) for n in numbers]
    for kind in ("tf", "array"):
        for part in (records[:third], [], records[third:]):  # one file is empty
            test_records.write(str(folder / f"{len(part)}.{kind}"), part, kind)
    test_imagenet.write(folder / "imagenet", third)
    gray = {f"{n % 3}/{n:02}.{'png' if n % 2 else 'jpg'}": 12 * n for n in numbers}
    test_image_folder.write(folder / "images", gray)
    columns = {"x": np.sqrt(numbers), "color": ["red", "blue", "red"] * third, "number": numbers}
    frame = pandas.DataFrame(columns)
    frame.to_csv(folder / "table.csv", index=False)
    frame.to_parquet(folder / "table.parquet")
    text = bytes(n for number in numbers for n in [number, *range(100, 100 + LENGTH - 1)])
    (folder / "0.text").write_bytes(text[: third * LENGTH + 1])
    (folder / "1.text").write_bytes(text[third * LENGTH :] + b".")
    pairs = [f"{chr(65 + n) * 5}\n{chr(97 + n) * 3}\n" for n in numbers]  # two fill a row
    (folder / "lines").write_text("".join(pairs))


def _raw(item, seed):
    noise = tf.random.stateless_uniform([2], seed)
    pixels = tf.ensure_shape(tf.io.decode_raw(item["image"], tf.uint8), [2])
    return {"image": tf.cast(pixels, tf.float32) + noise, "label": item["label"]}


def _table(folder: Path, ending: str) -> ddl.data.Source:
    features = {"numbers": ["x", "number"], "color": "color", "number": "number"}
    colors = {"color": ["blue", "red"]}
    return ddl.data.table(str(folder / f"table.{ending}"), features, categories=colors)


READERS = {
    "items": (lambda _: ddl.data.Source(_Refilling()), "x"),
    "bytes": (lambda _: ddl.data.Source({"x": np.arange(63, dtype="u1").reshape(ROWS, 3)}), "x"),
    "int32": (lambda _: ddl.data.Source({"x": np.arange(ROWS, dtype=np.int32) - 5}), "x"),
    "tf_records": (
        lambda f: ddl.data.tf_records(
            f"{f}/*.tf", {"image": tf.io.FixedLenFeature([], tf.string), **_LABEL}, _raw
        ),
        "label",
    ),
    "array_records": (lambda f: ddl.data.array_records(f"{f}/*.array", _LABEL), "label"),
    "imagenet": (
        lambda f: ddl.data.imagenet("train", f / "imagenet", image_shape=(8, 8, 3)),
        "label",
    ),
    "image_folder": (lambda f: ddl.data.image_folder(f / "images", (4, 4)), "image"),
    "csv": (lambda f: _table(f, "csv"), "number"),
    "parquet": (lambda f: _table(f, "parquet"), "number"),
    "tokens": (lambda f: ddl.data.tokens([f / "0.text", f / "1.text"], LENGTH), "token"),
    "packed_lines": (lambda f: ddl.data.packed(ddl.data.token_lines(f / "lines"), LENGTH), "token"),
    "digits": (lambda _: ddl.data.subset(ddl.data.digits("train"), ROWS), "input"),
    "penguins": (lambda _: ddl.data.subset(ddl.data.penguins("train"), ROWS), "numbers"),
    "play": (lambda _: ddl.data.subset(ddl.data.play("test", LENGTH), ROWS), "token"),
    "shapes": (lambda _: ddl.data.subset(ddl.data.shapes("test", "kinds"), ROWS), "image"),
    "synthetic": (lambda _: ddl.data.synthetic({"x": ((3,), "float64")}, ROWS), "x"),
}
"""Makes the examples of a reader, of items or of arrays; a feature tells them apart."""


class _SideBySide:
    """The rows of all readers, each feature under its reader's name."""

    def __init__(self, sources):
        self.sources = sources

    def __len__(self):
        return ROWS

    def rows(self, indices):
        return {
            f"{reader}/{name}": column
            for reader, source in self.sources.items()
            for name, column in source.rows(indices).items()
        }


@functools.cache
def all_readers(folder: Path) -> ddl.data.Source:
    """Returns the examples of all readers side by side, so that one trainer reads with each.

    The image is [readers, numbers]: the first numbers of all features of a reader's example.
    """
    sources = {reader: make(folder) for reader, (make, _) in READERS.items()}

    def decode(item, seed):
        rows = []
        for reader, source in sources.items():
            example = {name: item[f"{reader}/{name}"] for name in source.row_spec}
            if source.decode is not None:
                example = source.decoded(example, seed)
            flat = [tf.reshape(tf.cast(value, tf.float64), [-1]) for value in example.values()]
            numbers = tf.concat(flat, 0)[:NUMBERS]
            numbers /= 160 + 10 * tf.abs(numbers)
            rows.append(tf.pad(numbers, [[0, NUMBERS - numbers.shape[0]]]))
        return {"image": tf.stack(rows), "label": tf.ones([len(rows)], tf.float64)}

    return ddl.data.Source(_SideBySide(sources), decode)


def linear_in_readers() -> ddl.Regression:
    """Returns a linear function for each reader of its numbers, which is to be 1."""
    layer = keras.layers.EinsumDense("brd,rd->br", len(READERS))
    model = keras.Sequential([keras.Input((len(READERS), NUMBERS)), layer])
    return ddl.Regression(model, input_name="image")
