"""Small files in the true format of every source, and a task that trains on all of them at once.

One trainer on all sources traces once what a trainer for each would trace many times.
"""

import importlib.util
from pathlib import Path

import gin
import keras
import numpy as np
import tensorflow as tf
from pyarrow import csv, parquet

import ddl
from ddl.data.source import Source

CLASSES, COUNT = 3, 22
HAS_ARRAY_RECORD = importlib.util.find_spec("array_record") is not None
_RANDOM = np.random.default_rng(0)
IMAGES = _RANDOM.integers(0, 255, (COUNT, 4, 4, 1)).astype(np.uint8)
LABELS = np.arange(COUNT) % CLASSES


def write(folder):
    """Writes the files of all sources."""
    for number, (image, label) in enumerate(zip(IMAGES, LABELS, strict=True)):
        file = folder / "images" / str(label) / f"{number:03}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        tf.io.write_file(str(file), tf.io.encode_png(image))
    np.save(folder / "images.npy", IMAGES)
    np.save(folder / "labels.npy", LABELS)
    np.savez(folder / "both.npz", image=IMAGES, label=LABELS)
    rows = [f"{n}.5,{('red', 'blue')[n % 2]}" for n in range(COUNT)]
    (folder / "table.csv").write_text("\n".join(["income,colour", *rows]))
    parquet.write_table(csv.read_csv(folder / "table.csv"), folder / "table.parquet")
    text = "".join(f"line {n} of {COUNT}\n" for n in range(COUNT))
    (folder / "text.txt").write_text(text)
    (folder / "damaged").mkdir()
    for name in ("part-0", "damaged/part-0"):
        with tf.io.TFRecordWriter(str(folder / name)) as records:
            for image, label in zip(IMAGES, LABELS, strict=True):
                records.write(_serialized(image, label))
    damaged = bytearray((folder / "damaged" / "part-0").read_bytes())
    damaged[len(damaged) - 20] ^= 1  # of the last record, whose checksum is then wrong
    (folder / "damaged" / "part-0").write_bytes(damaged)
    if HAS_ARRAY_RECORD:
        from array_record.python.array_record_module import ArrayRecordWriter

        writer = ArrayRecordWriter(str(folder / "all.array_record"), "group_size:1")
        for image, label in zip(IMAGES, LABELS, strict=True):
            writer.write(_serialized(image, label))
        writer.close()


def _serialized(image, label):
    encoded = tf.train.BytesList(value=[tf.io.encode_png(image).numpy()])
    feature = {
        "image": tf.train.Feature(bytes_list=encoded),
        "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
    }
    return tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString()


FEATURES = {"image": ("image", "image", (4, 4, 1)), "label": ("label", "int64", ())}


def arrays(folder):
    return ddl.data.ArraySource(image=IMAGES, label=LABELS)


def image_folder(folder):
    return ddl.data.ImageFolder(folder / "images", (4, 4, 1))


def npy(folder):
    files = {"image": folder / "images.npy", "label": folder / "labels.npy"}
    return ddl.data.numpy_files(files, in_memory=False)


def npz(folder):
    return ddl.data.numpy_files(folder / "both.npz")


def csv_table(folder):
    return ddl.data.table(str(folder / "table.csv"), categories={"colour": ["red", "blue"]})


def parquet_table(folder):
    return ddl.data.table(str(folder / "table.parquet"), categories={"colour": ["red", "blue"]})


def lines(folder):
    return ddl.data.text_lines(folder / "text.txt")


def windows(folder):
    return ddl.data.token_windows(folder / "text.txt", 8)


def records(folder):
    return ddl.data.record_files(str(folder / "part-*"), FEATURES)


def damaged(folder):
    with_a_bad_record = ddl.data.record_files(str(folder / "damaged" / "part-0"), FEATURES)
    return ddl.data.skip_damaged(with_a_bad_record, limit=1)


def mixture(folder):
    first = ddl.data.subset((IMAGES, LABELS), first=13)
    return ddl.data.Mixture([image_folder(folder), first], [0.4, 0.6])


def array_records(folder):
    return ddl.data.record_files(str(folder / "all.array_record"), FEATURES)


def concatenated(folder):
    return ddl.data.concatenation([image_folder(folder), npy(folder)])


def part(folder):
    return ddl.data.subset(records(folder), first=17)


def fold(folder):
    return ddl.data.k_fold(npy(folder), folds=3, fold=1, part="train")


def packed(folder):
    return ddl.data.packed(ddl.data.token_lines(folder / "text.txt"), 30)


def items(folder):
    return ddl.data.from_items(
        [(image, label) for image, label in zip(IMAGES, LABELS, strict=True)]
    )


class Batches(keras.utils.PyDataset):
    """Batches of 5, the last of 2."""

    def __len__(self):
        return -(-COUNT // 5)

    def __getitem__(self, number):
        rows = slice(5 * number, 5 * number + 5)
        return IMAGES[rows], LABELS[rows]


class EndlessBatches(Batches):
    """Batches of 5 of the images, again and again."""

    num_batches = None

    def __getitem__(self, number):
        rows = np.arange(5 * number, 5 * number + 5) % COUNT
        return IMAGES[rows], LABELS[rows]


def py_dataset(folder):
    return ddl.data.as_source(Batches())


def endless_py_dataset(folder):
    return ddl.data.endless(EndlessBatches(), steps_per_epoch=3)


def generator(folder):
    def examples():
        yield from (
            {"image": image, "label": label} for image, label in zip(IMAGES, LABELS, strict=True)
        )

    return ddl.data.endless(examples, steps_per_epoch=3)


def generator_from_start(folder):
    def examples(start):
        while True:
            yield IMAGES[start % COUNT], LABELS[start % COUNT]
            start += 1

    return ddl.data.endless(examples, steps_per_epoch=3)


def filtered(folder):
    dataset = tf.data.Dataset.from_tensor_slices((IMAGES, LABELS))
    return ddl.data.endless(dataset.filter(lambda x, y: y != 1), steps_per_epoch=3)


def shuffled(folder):
    """Its second pass has another order than the first."""

    def dataset():
        slices = tf.data.Dataset.from_tensor_slices((IMAGES, LABELS))
        return slices.shuffle(COUNT, seed=3).repeat()

    return ddl.data.endless(dataset, steps_per_epoch=3)


def stream(folder):
    return ddl.data.StreamSource(tf.data.Dataset.from_tensor_slices((IMAGES, LABELS)))


SOURCES = {
    make.__name__: make
    for make in (
        *(arrays, image_folder, npy, npz, csv_table, parquet_table, lines, windows, records),
        *(damaged, mixture, items, py_dataset, endless_py_dataset, generator),
        *(generator_from_start, filtered, shuffled, stream),
        *(concatenated, part, fold, packed),
        *((array_records,) if HAS_ARRAY_RECORD else ()),
    )
}


@gin.register
class EverySource(Source):
    """The batches of all sources beside each other: features `SOURCE/FEATURE`."""

    def __init__(self, folder):
        self.sources = {name: make(Path(folder)) for name, make in SOURCES.items()}

    def __len__(self):
        return COUNT

    @property
    def element_spec(self):
        weight = {"weight": tf.TensorSpec([], tf.float32)}
        return {
            f"{name}/{feature}": spec
            for name, source in self.sources.items()
            for feature, spec in {**source.element_spec, **weight}.items()
        }

    def batches(self, global_batch_size, first_batch, **options):
        def joined(*batches):
            parts = zip(self.sources, batches, strict=True)
            made = {f"{name}/{k}": values for name, batch in parts for k, values in batch.items()}
            return {**made, "weight": tf.ones_like(batches[0]["weight"])}

        parts = [
            s.batches(global_batch_size, first_batch, **options) for s in self.sources.values()
        ]
        return tf.data.Dataset.zip(*parts).map(joined)


@gin.register
class OneWeightForEachColumn:
    """Scales each number of each feature of each source to 0.5, with a weight of its own."""

    def __init__(self):
        self.model = Scaling()

    def per_example(self, features, training):
        return ddl.PerExample(loss=self.model(features))


class Scaling(keras.layers.Layer):
    """The sum of the weighted losses of all sources, [b]. Few operations, since each is traced."""

    def build(self, shapes):
        sizes = {name: int(np.prod(shape[1:])) for name, shape in columns_of(shapes).items()}
        self.source_of = np.repeat([name.split("/")[0] for name in sizes], list(sizes.values()))
        self.scale = self.add_weight(shape=[len(self.source_of)], initializer="ones", name="scale")

    def call(self, features):
        columns = tf.concat([numbers(v) for v in columns_of(features).values()], axis=1)
        weight = tf.stack([features[f"{name}/weight"] for name in SOURCES], axis=1)
        of_column = [list(SOURCES).index(name) for name in self.source_of]
        weight = tf.gather(tf.cast(weight, tf.float64), of_column, axis=1)
        return tf.reduce_sum(weight * (columns * self.scale - 0.5) ** 2, axis=1)


def columns_of(features):
    """Returns the features of all sources but the weights."""
    names = (name for name in sorted(features) if "/" in name and not name.endswith("/weight"))
    return {name: features[name] for name in names}


def numbers(values):
    """Returns a feature as numbers from 0 to 1, [b, n]."""
    if values.dtype == tf.string:
        values = tf.strings.to_hash_bucket_fast(values, 100)
    return tf.reshape(tf.cast(values, tf.float64) / 300, [values.shape[0], -1])


def weights(trainer):
    """Returns the weights of each source's columns."""
    layer = trainer.task.model
    return {name: [layer.scale.numpy()[layer.source_of == name]] for name in SOURCES}
