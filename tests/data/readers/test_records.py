"""TFRecord and ArrayRecord files are read at any record, and damage is named with its place."""

import os
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from array_record.python.array_record_module import ArrayRecordWriter

from ddl.data.readers.records import array_records, tf_records
from ddl.errors import ConfigError, DataError
from tests.data.decoding import examples

FEATURES = {
    "image": tf.io.FixedLenFeature([], tf.string),
    "label": tf.io.FixedLenFeature([], tf.int64),
}
COUNTS = (5, 0, 7)


def example(number):
    # Bytes that end with zeros are kept.
    features = {
        "image": tf.train.Feature(bytes_list=tf.train.BytesList(value=[bytes([number, 0])])),
        "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[number])),
    }
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


def write(path, records, kind="tf"):
    is_tf = kind == "tf"
    writer = tf.io.TFRecordWriter(path) if is_tf else ArrayRecordWriter(path, "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()
    return path


@pytest.fixture(params=["tf", "array"])
def reader(request):
    return {"tf": tf_records, "array": array_records}[request.param]


@pytest.fixture
def files(reader, tmp_path):
    """Twelve examples in three files, one of which is empty."""
    kind = "tf" if reader is tf_records else "array"
    starts = np.cumsum([0, *COUNTS])
    return [
        write(str(tmp_path / f"{number}"), map(example, range(start, start + count)), kind)
        for number, (start, count) in enumerate(zip(starts, COUNTS, strict=False))
    ]


def test_records_of_several_files_are_read_in_any_order(reader, files):
    source = reader(files)
    order = [11, 0, 5, 4, 0, 6, 11]
    records = source.rows(np.array(order))["record"]
    assert len(source) == 12
    assert records.tolist() == [example(number) for number in order]
    assert list(source.files) == files


def test_features_are_parsed(reader, files):
    for features in (FEATURES, {name: tuple(feature) for name, feature in FEATURES.items()}):
        source = reader(files, features)
        assert source.element_spec["label"] == tf.TensorSpec([], tf.int64, "label")
        assert [one["label"] for one in examples(source)] == list(range(12))


def test_decode_gets_the_parsed_features_and_the_seed(reader, files):
    def decode(item, seed):
        pixels = tf.ensure_shape(tf.io.decode_raw(item["image"], tf.uint8), [2])
        drawn = tf.random.stateless_uniform([], seed, 0, 1000, tf.int32)
        return {"pixels": pixels, "drawn": drawn, "label": item["label"]}

    source = reader(files, FEATURES, decode)
    (one,), (other,) = (examples(source, [7], seed) for seed in ((1, 2), (1, 3)))
    assert one["pixels"].tolist() == [7, 0]
    assert one["label"] == 7
    assert one["drawn"] != other["drawn"]


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ({"labels": FEATURES["label"]}, "fit record 0 of .*labels"),
        ({"label": tf.io.FixedLenFeature([2], tf.int64)}, "fit record 0 of .*label"),
        ({"label": ([],)}, "fit record 0 of .*'dtype'"),
        ({"label": tf.io.VarLenFeature(tf.int64)}, "'label' of .* is a SparseTensor"),
    ],
)
def test_features_that_do_not_fit_are_refused_at_the_start(reader, files, features, message):
    with pytest.raises(DataError, match=message):
        reader(files, features)


def test_messages_name_the_users_decode(reader, files):
    def crops(item, seed):
        return {"label": item["label"] + tf.random.uniform([], 0, 5, tf.int64)}

    with pytest.raises(DataError, match=r"test_records\.py:\d+: crops draws random numbers"):
        reader(files, FEATURES, crops)
    with pytest.raises(ConfigError, match=r"\(item, seed\), got .*test_records\.py"):
        reader(files, FEATURES, lambda item: item)


def test_a_record_of_another_form_is_named(tmp_path):
    records = [example(0), example(1), tf.train.Example().SerializeToString()]
    source = tf_records(write(str(tmp_path / "a"), records), FEATURES)
    found = source.undecodable(np.array([1, 0, 2]))
    assert "record 2 of" in str(found)
    assert str(found).endswith("is required but could not be found. Correct or remove it.")
    assert source.undecodable(np.array([0, 1])) is None


def test_a_damaged_record_is_named_and_the_others_are_read(reader, tmp_path):
    records = [os.urandom(5000) for _ in range(12)]
    kind = "tf" if reader is tf_records else "array"
    other = write(str(tmp_path / "a"), records[:2], kind)
    path = write(str(tmp_path / "b"), records, kind)
    content = bytearray(Path(path).read_bytes())
    content[content.index(records[7]) + 2500] ^= 1
    Path(path).write_bytes(content)
    source = reader([other, path])
    with pytest.raises(DataError, match=r"ecord 7 of .*/b"):
        source.rows(np.arange(14))
    assert source.rows(np.array([8, 10]))["record"].tolist() == [records[6], records[8]]


@pytest.mark.parametrize("left", [200, 3])
def test_a_truncated_file_is_named(tmp_path, left):
    path = write(str(tmp_path / "a"), [bytes(100)] * 9)
    os.truncate(path, 116 + left)
    record = 1 + left // 116
    with pytest.raises(DataError, match=rf"{path} is truncated: record {record} would end at byte"):
        tf_records(path)


def test_a_file_that_shrinks_later_is_named(tmp_path):
    path = write(str(tmp_path / "a"), [bytes(100)] * 3)
    source = tf_records(path)
    os.truncate(path, 200)
    with pytest.raises(DataError, match="checksum of record 1 of .*file has changed"):
        source.rows(np.arange(2))
    os.remove(path)
    with pytest.raises(DataError, match=rf"No such file.*{path}"):
        source.rows(np.arange(2))


def test_files_of_another_format_or_without_records_are_refused(tmp_path):
    path = str(tmp_path / "a")
    with tf.io.TFRecordWriter(path, "GZIP") as writer:
        writer.write(bytes(1000))
    with pytest.raises(DataError, match=f"{path} is compressed, damaged, or no TFRecord file"):
        tf_records(path)
    with pytest.raises(DataError, match=f"{path} is truncated, or no ArrayRecord file"):
        array_records(path)
    with pytest.raises(DataError, match="TFRecords must have at least one example"):
        tf_records(write(str(tmp_path / "empty"), []), FEATURES)
