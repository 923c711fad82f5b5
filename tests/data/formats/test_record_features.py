import os

import numpy as np
import pytest
import tensorflow as tf
from ddl.data.formats import record_files

from ddl.data.checks import data_errors
from ddl.errors import ConfigError, DataError
from tests.data.test_records import taken

FEATURES = {
    "image": ("img", "image", (2, 3, 1)),
    "pixels": ("raw", "raw uint8", (2, 2)),
    "label": ("y", "int64", ()),
    "x": ("x", "float32", (2,)),
    "name": ("name", "string", ()),
}


def example(number, size=(2, 3), leave_out=""):
    def of(kind, **values):
        return tf.train.Feature(**{f"{kind}_list": values.pop("made")})

    bytes_of = [
        ("img", tf.io.encode_png(tf.fill([*size, 1], tf.cast(number, tf.uint8))).numpy()),
        ("raw", np.full((2, 2), number, np.uint8).tobytes()),
        ("name", str(number).encode()),
    ]
    features = {key: of("bytes", made=tf.train.BytesList(value=[v])) for key, v in bytes_of}
    features["y"] = of("int64", made=tf.train.Int64List(value=[number]))
    features["x"] = of("float", made=tf.train.FloatList(value=[number, 0.5]))
    features.pop(leave_out, None)
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


@pytest.fixture
def pattern(tmp_path):
    for part in range(2):
        with tf.io.TFRecordWriter(str(tmp_path / f"train-{part}")) as file:
            for number in range(2):
                file.write(example(10 * part + number))
    return str(tmp_path / "train-*")


def test_all_dtypes(pattern):
    source = record_files(pattern, FEATURES)
    (batch,) = taken(source, 1, shuffle=False)
    numbers = [0, 1, 10, 11]
    assert batch["label"].tolist() == numbers
    assert batch["name"].tolist() == [str(number).encode() for number in numbers]
    assert batch["x"].tolist() == [[number, 0.5] for number in numbers]
    assert batch["image"].shape == (4, 2, 3, 1)
    assert batch["image"][:, 0, 0, 0].tolist() == batch["pixels"][:, 0, 0].tolist() == numbers
    assert batch["image"].dtype == batch["pixels"].dtype == np.uint8
    assert len(record_files(pattern, FEATURES, num_examples=3)) == 3


@pytest.mark.parametrize(
    ("features", "error", "message"),
    [
        ({}, ConfigError, "at least one feature"),
        ({"x": "x"}, ConfigError, r"must be \(key, dtype, shape\)"),
        ({"x": ("x", "float32", 2)}, ConfigError, r"must be \(key, dtype, shape\)"),
        ({"x": ("x", "float", ())}, ConfigError, "got 'float'"),
        ({"x": ("x", "raw text", ())}, ConfigError, "got 'raw text'"),
        ({"x": ("img", "image", (2, 3))}, ConfigError, "the shape .height, width, channels."),
        ({"x": ("z", "float32", (2,))}, DataError, "First record|first record .*'z'"),
        ({"x": ("x", "float32", (3,))}, DataError, "first record"),
        ({"x": ("x", "int64", (2,))}, DataError, "first record"),
        ({"x": ("raw", "raw uint8", (3,))}, DataError, "first record"),
        ({"x": ("raw", "image", (2, 3, 1))}, DataError, "first record"),
        ({"x": ("img", "image", (3, 3, 1))}, DataError, "first record .* pixels, expected"),
    ],
)
def test_bad_features(pattern, features, error, message):
    with pytest.raises(error, match=message):
        record_files(pattern, features)


def test_no_file_matches(tmp_path):
    with pytest.raises(DataError, match=r"No file matches .*absent-\*"):
        record_files(str(tmp_path / "absent-*"), FEATURES)


def shard(folder, name):
    with tf.io.TFRecordWriter(str(folder / name)) as file:
        file.write(example(1))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ["r-00000-of-00003", "r-00002-of-00003"],
            "complete sets of shards, but 1 of 3 shards are missing, first .*/r-00001-of-00003",
        ),
        (
            ["r-0-of-1.tfrecord", "r-0-of-2.tfrecord", "r-1-of-2.tfrecord"],
            r"matches two sets, .*r-\*-of-1\.tfrecord and .*r-\*-of-2\.tfrecord",
        ),
    ],
)
def test_shards_that_are_missing_or_too_many(tmp_path, names, message):
    for name in names:
        shard(tmp_path, name)
    with pytest.raises(DataError, match=message):
        record_files(str(tmp_path / "r-*"), FEATURES)


def test_shards_may_be_counted_from_one(tmp_path):
    for number in (1, 2, 3):
        shard(tmp_path, f"r-{number}-of-3")
    assert len(record_files(str(tmp_path / "r-*"), FEATURES)) == 3
    os.remove(tmp_path / "r-2-of-3")
    with pytest.raises(DataError, match=r"1 of 3 shards are missing, first .*/r-2-of-3"):
        record_files(str(tmp_path / "r-*"), FEATURES)


def test_some_shards_may_be_chosen(tmp_path):
    names = ["r-00000-of-00003", "r-00002-of-00003"]
    for name in names:
        shard(tmp_path, name)
    assert len(record_files([str(tmp_path / name) for name in names], FEATURES)) == 2
    assert len(record_files(str(tmp_path / "r-0000[02]-of-*"), FEATURES)) == 2


def test_a_file_that_is_listed_twice(tmp_path):
    shard(tmp_path, "a")
    (tmp_path / "link").symlink_to("a")
    paths = [f"{tmp_path}/{name}" for name in ("a", "./a", "link")]
    for other in paths:
        with pytest.raises(DataError, match=r"must list each file once, got .*/a.* Remove one"):
            record_files([paths[0], other], FEATURES)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (lambda: example(2, leave_out="y"), "y .*int64.* is required but could not be found"),
        (
            lambda: example(2, size=(4, 5)),
            "The image of feature 'image' is 4×5 pixels, expected 2×3. Set the feature's shape",
        ),
        (lambda: b"no example", "Could not parse example"),
    ],
    ids=["feature", "size", "none"],
)
def test_a_later_record_of_another_form_is_named(tmp_path, record, reason):
    with tf.io.TFRecordWriter(str(tmp_path / "train-0")) as file:
        for each in (example(1), example(1), record(), example(3)):
            file.write(each)
    source = record_files(str(tmp_path / "train-*"), FEATURES)
    first = 2 * (len(example(1)) + 16)
    named = rf"(?s){reason}.*cannot be read is the record at byte {first:,} of .*/train-0\."
    with pytest.raises(DataError, match=named), data_errors(source):
        taken(source, 1, shuffle=False)
