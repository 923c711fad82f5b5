"""TFRecord and ArrayRecord files are read at any record, and damage is named with its place."""

import os
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from array_record.python.array_record_module import ArrayRecordWriter

from ddl.data.readers.paths import found_files
from ddl.data.readers.records import array_records, tf_records
from ddl.errors import DataError


def example(features):
    """Returns a record of integers and texts by name."""
    made = tf.train.Example()
    for name, value in features.items():
        feature = made.features.feature[name]
        values = feature.bytes_list if isinstance(value, bytes) else feature.int64_list
        values.value.append(value)
    return made.SerializeToString()


def write(path, records, kind):
    is_tf = kind == "tf"
    writer = tf.io.TFRecordWriter(path) if is_tf else ArrayRecordWriter(path, "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()
    return path


@pytest.mark.parametrize(("kind", "reader"), [("tf", tf_records), ("array", array_records)])
def test_a_damaged_record_or_file_is_named_and_the_others_are_read(kind, reader, tmp_path):
    records = [os.urandom(5000) for _ in range(12)]
    other = write(str(tmp_path / "a"), records[:2], kind)
    path = write(str(tmp_path / "b"), records, kind)
    content = bytearray(Path(path).read_bytes())
    content[content.index(records[7]) + 2500] ^= 1
    Path(path).write_bytes(content)
    source = reader([other, path])
    with pytest.raises(DataError, match=r"ecord 7 of .*/b"):
        source.rows(np.arange(14))
    assert source.rows(np.array([8, 10]))["record"].tolist() == [records[6], records[8]]
    Path(path).write_bytes(content[:-100])
    with pytest.raises(DataError, match="/b is truncated"):
        reader([other, path])


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ("none-*", r"x\.files must name existing files .*none-\*.*we are in"),
        (["a", "b", "../in/a"], r"each file once, got .*/in/a 2 times"),
    ],
)
def test_files_that_are_missing_or_doubled_are_named(tmp_path, monkeypatch, files, message):
    folder = tmp_path / "in"
    folder.mkdir()
    for name in "ab":
        (folder / name).touch()
    monkeypatch.chdir(folder)
    with pytest.raises(DataError, match=message):
        found_files(files, "x.files")


def test_a_pattern_misses_no_shard_that_it_matches(tmp_path):
    shards = [str(tmp_path / f"train-{number:05d}-of-00004.rec") for number in (0, 1, 3)]
    for shard in shards:
        Path(shard).touch()
    with pytest.raises(DataError, match=r"1 of 00004 are missing, such as .*train-00002-of-00004"):
        found_files(str(tmp_path / "train-*"), "x.files")
    assert found_files(str(tmp_path / "train-0000[01]-*"), "x.files") == shards[:2]
    for number in range(10):
        Path(tmp_path / f"unpadded-{number}-of-10").touch()
    assert len(found_files(str(tmp_path / "unpadded-*"), "x.files")) == 10


WRONG = [
    ({"label": ((2,), "int64")}, "do not fit record 0 of .*label"),
    ({"number": ((), "int64")}, "do not fit record 0 of .*number"),
    ({"label": ((), "float32")}, "do not fit record 0 of .*label"),
]


@pytest.mark.parametrize(("features", "message"), WRONG)
def test_a_wrong_specification_names_record_and_feature(tmp_path, features, message):
    path = write(str(tmp_path / "a"), [example({"label": 5})], "tf")
    with pytest.raises(DataError, match=message):
        tf_records(path, features)


def test_a_compressed_file_is_named(tmp_path):
    path = str(tmp_path / "a.gz")
    with tf.io.TFRecordWriter(path, "GZIP") as writer:
        writer.write(example({"label": 5}))
    with pytest.raises(DataError, match="a.gz is compressed, damaged, or no TFRecord file"):
        tf_records(path)
