import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from ddl.data import BatchPipeline, RecordSource, decoded
from ddl.data.checks import data_errors
from ddl.errors import ConfigError, DataError

LENGTHS = (4, 0, 7)  # records of each file
COUNT = sum(LENGTHS)


def written(folder, options=None):
    """Files of records of different lengths, which hold their number."""
    files, number = [], 0
    for place, length in enumerate(LENGTHS):
        files.append(str(folder / f"part-{place}"))
        with tf.io.TFRecordWriter(files[-1], options) as file:
            for _ in range(length):
                file.write(str(number).zfill(number + 2).encode())
                number += 1
    return files


def decode(record, seed):
    return {
        "x": tf.strings.to_number(record, tf.int64),
        "draw": tf.random.stateless_uniform([], seed),
    }


def taken(source, count, *, first=0, batch=4, seed=0, shuffle=True, rows=None):
    batches = source.batches(batch, first, seed=seed, shuffle=shuffle, rows=rows).take(count)
    return [{name: values.numpy() for name, values in each.items()} for each in batches]


def test_unshuffled_they_come_in_the_files_order(tmp_path):
    source = RecordSource(written(tmp_path), decode)
    assert len(source) == COUNT
    assert source.element_spec["x"] == tf.TensorSpec([], tf.int64, "x")
    batches = taken(source, 3, shuffle=False)
    assert [x for batch in batches for x in batch["x"]] == [*range(COUNT), 0]
    assert [w for batch in batches for w in batch["weight"]] == [1] * COUNT + [0]


def test_each_epoch_has_each_record_once_in_an_order_of_its_own(tmp_path):
    source = RecordSource(written(tmp_path), decode)
    epochs = []
    for first in (0, 3):
        batches = taken(source, 3, first=first)
        epochs.append([x for b in batches for x, w in zip(b["x"], b["weight"], strict=True) if w])
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(COUNT))
    assert epochs[0] != epochs[1]


def test_draws_follow_from_seed_epoch_and_example_alone(tmp_path):
    source = RecordSource(written(tmp_path), decode)

    def draws(batch, seed=0, first=0):
        size = -(-COUNT // batch)
        batches = taken(source, size, batch=batch, first=first * size, seed=seed)
        return dict(
            (int(x), float(d))
            for b in batches
            for x, d, w in zip(b["x"], b["draw"], b["weight"], strict=True)
            if w
        )

    first = draws(4)
    assert len(set(first.values())) == COUNT
    assert draws(3) == first
    for other in (draws(4, first=1), draws(4, seed=1)):
        assert all(first[x] != other[x] for x in first)


def test_any_batch_is_found_and_rows_of_it(tmp_path):
    source = RecordSource(written(tmp_path), decode)
    straight = taken(source, 7)
    rows = np.array([3, 1])
    for whole, part in zip(straight[4:], taken(source, 3, first=4, rows=rows), strict=True):
        for name in whole:
            np.testing.assert_array_equal(part[name], whole[name][rows], err_msg=name)


@pytest.mark.parametrize("batch", [1, 7, 12, 32])
def test_several_records_in_a_call_are_those_of_a_call_each(tmp_path, monkeypatch, batch):
    traces = []

    def weighing(record, seed):
        traces.append(record)
        draw = tf.random.stateless_normal([3], seed)
        return {"text": record, "draw": draw, "weight": tf.abs(draw[0])}

    source = RecordSource(written(tmp_path), weighing)
    several = source._decoded_at_once(batch)
    assert several == {1: 1, 7: 7, 12: 12, 32: 16}[batch]
    traces.clear()
    found = taken(source, 4, batch=batch)
    assert len(traces) == 1
    monkeypatch.setattr(decoded, "_MOST_AT_ONCE", 1)
    for ours, theirs in zip(found, taken(source, 4, batch=batch), strict=True):
        assert ours.keys() == theirs.keys() == {"text", "draw", "weight"}
        for name, values in theirs.items():
            np.testing.assert_array_equal(ours[name], values, err_msg=name)


def test_large_records_have_a_call_each(tmp_path):
    source = RecordSource(written(tmp_path), lambda record, seed: {"x": tf.zeros([256, 256])})
    assert source._decoded_at_once(8) == 1


def test_large_records_have_a_call_for_each_core(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    lock, most = threading.Lock(), []

    def slow(record):
        assert lock.acquire(blocking=False), "two calls at a time"
        time.sleep(0.02)  # so that another call would begin
        most.append(record)
        lock.release()
        return np.zeros([256, 256], np.float32)

    def decoding(record, seed):
        return {"x": tf.ensure_shape(tf.numpy_function(slow, [record], tf.float32), [256, 256])}

    taken(RecordSource(written(tmp_path), decoding), 2)
    assert len(most) >= 8


class _Doubled(RecordSource):
    def example(self, index, seed):
        features = super().example(index, seed)
        return {**features, "x": 2 * features["x"]}


class _Exclaiming(RecordSource):
    def record(self, index):
        return super().record(index) + "0"


@pytest.mark.parametrize(("kind", "factor"), [(_Doubled, 2), (_Exclaiming, 10)])
def test_a_subclass_may_change_examples_or_records(tmp_path, kind, factor):
    source = kind(written(tmp_path), decode)
    assert source._records.blocks is not None
    (batch,) = taken(source, 1, batch=COUNT, shuffle=False)
    assert batch["x"].tolist() == [factor * number for number in range(COUNT)]


def _in_a_branch(seed):
    return tf.cond(seed[0] > 0, lambda: tf.random.uniform([]), lambda: 0.0)


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("draw", [lambda seed: tf.random.uniform([]), _in_a_branch])
def test_draws_without_the_seed_are_refused(tmp_path, batch, draw):
    """All examples of a call would have the same ones, and a resumed run others."""
    source = RecordSource(written(tmp_path), lambda record, seed: {"draw": draw(seed)})
    with pytest.raises(DataError, match=r"RecordSource must .* by the operation '.*' \(RandomUni"):
        taken(source, 1, batch=batch)


def test_only_the_rows_that_are_asked_for_are_read(tmp_path):
    read = []

    def note(text):
        read.append(int(text))
        return text

    def noting(record, seed):
        noted = tf.ensure_shape(tf.numpy_function(note, [record], tf.string), [])
        return {"x": tf.strings.to_number(noted)}

    source = RecordSource(written(tmp_path), noting)
    taken(source, 2, batch=4, shuffle=False, rows=np.array([1, 3]))
    # Threads may have read ahead, but never another worker's rows.
    assert {1, 3, 5, 7} <= set(read)
    epoch = [row for row in range(12) if row % 4 in (1, 3)]
    assert set(read) <= {row % COUNT for row in epoch}


def test_fewer_than_all_are_the_first(tmp_path):
    source = RecordSource(written(tmp_path), decode, num_examples=5)
    assert sorted(x for b in taken(source, 5, batch=1) for x in b["x"]) == list(range(5))
    with pytest.raises(DataError, match="at most 11, the number of records in the 3 files, got 12"):
        RecordSource(written(tmp_path), decode, num_examples=12)


@pytest.mark.parametrize("number", [0, -1])
def test_numbers_that_cannot_be_are_told(tmp_path, number):
    with pytest.raises(DataError, match=f"num_examples must be at least 1, .* got {number}"):
        RecordSource(written(tmp_path), decode, num_examples=number)


def test_an_empty_list_of_files_is_told():
    with pytest.raises(DataError, match="files is empty"):
        RecordSource([], decode, num_examples=5)


def test_as_data_of_a_pipeline(tmp_path, strategy):
    source = RecordSource(written(tmp_path), decode)
    pipeline = BatchPipeline(source, 4, seed=3)
    expected = taken(source, 1, first=5, seed=3)[0]["x"]
    batch = pipeline.next_batch(pipeline.iterator(strategy, 5), strategy, tf.constant(5, tf.int64))
    examples = strategy.run(pipeline.examples, args=(batch,))
    got = [x for part in strategy.experimental_local_results(examples["x"]) for x in part.numpy()]
    np.testing.assert_array_equal(got, expected)


def text(file):
    file.write_bytes(b"image,label\n" * 9)


def missing(file):
    file.unlink()


@pytest.mark.parametrize(
    ("end", "told"),
    [
        (-3, "begins at byte 147 would end at byte 175 or later, but the file has 172"),
        (-20, "begins at byte 147 would end at byte 163 or later, but the file has 155"),
    ],
)
def test_the_record_that_is_cut_is_told(tmp_path, end, told):
    files = written(tmp_path)
    whole = (tmp_path / "part-2").read_bytes()
    (tmp_path / "part-2").write_bytes(whole[:end])
    with pytest.raises(DataError, match=told):
        RecordSource(files, decode)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (text, "truncated, compressed, or not a TFRecord file.* Copy it again, or decompress it"),
        (missing, "could not be read: .* Check the path"),
    ],
)
def test_files_that_are_none_are_told(tmp_path, damage, message):
    files = written(tmp_path)
    damage(tmp_path / "part-2")
    with pytest.raises(DataError, match=message) as told:
        RecordSource(files, decode)
    assert files[2] in str(told.value)


def test_compressed_files_are_told(tmp_path):
    files = written(tmp_path, tf.io.TFRecordOptions(compression_type="GZIP"))
    with pytest.raises(DataError, match="compressed"):
        RecordSource(files, decode)


def test_one_compressed_file_among_others_is_named(tmp_path):
    files = written(tmp_path)
    (tmp_path / "gz").mkdir()
    other = written(tmp_path / "gz", tf.io.TFRecordOptions(compression_type="GZIP"))[2]
    with pytest.raises(DataError, match="gz/part-2 is truncated, compressed, or not"):
        RecordSource([*files, other], decode)


def test_no_records_are_told(tmp_path):
    with pytest.raises(DataError, match="contain no records"):
        RecordSource(written(tmp_path)[1:2], decode)


def test_a_damaged_record_stops_the_step(tmp_path):
    files = written(tmp_path)
    data = bytearray((tmp_path / "part-0").read_bytes())
    data[12] ^= 1  # of the first record's text
    (tmp_path / "part-0").write_bytes(data)
    with pytest.raises(DataError, match="part-0 is damaged.*ddl.data.skip_damaged"), data_errors():
        taken(RecordSource(files, decode), 3, shuffle=False)


def test_a_large_record_that_is_damaged_is_named(tmp_path):
    """TensorFlow reads the largest records one by one."""
    file = tmp_path / "large"
    with tf.io.TFRecordWriter(str(file)) as writer:
        for number in range(3):
            writer.write(str(number).zfill(300_000).encode())
    content = bytearray(file.read_bytes())
    content[300_016 + 9_000] ^= 1  # in the middle of the second
    file.write_bytes(content)
    source = RecordSource([str(file)], decode)
    named = r"cannot be read is the record at byte 300,016 of .*/large\."
    with pytest.raises(DataError, match=named), data_errors(source):
        taken(source, 1, batch=3)


def test_a_file_that_goes_away_stops_the_step(tmp_path):
    source = RecordSource(written(tmp_path), decode)
    (tmp_path / "part-2").unlink()
    with pytest.raises(DataError, match="part-2"), data_errors():
        taken(source, 3, shuffle=False)


def test_features_without_a_static_shape_are_told(tmp_path):
    def decode_any(record, seed):
        return {"x": tf.io.decode_raw(record, tf.uint8)}

    with pytest.raises(DataError, match="same static shape in all examples, got .None,.. Pad"):
        RecordSource(written(tmp_path), decode_any)

    def decode_sparse(record, seed):
        return {"x": tf.sparse.from_dense(tf.io.decode_raw(record, tf.uint8))}

    with pytest.raises(DataError, match="got a sparse tensor, as tf.io.VarLenFeature gives"):
        RecordSource(written(tmp_path), decode_sparse)


@pytest.mark.parametrize(
    ("decode", "message"),
    [
        (
            lambda record: {"x": record},
            r"RecordSource.decode must be a function of \(record, seed\), got "
            r".*test_records.py:\d+: <lambda>\(record\)\. Change its arguments",
        ),
        ("decode", r"must be a function of \(record, seed\), got 'decode'"),
        (
            lambda record, seed: (record, seed),
            r"must return a dict of features by name, got tuple from .*test_records.py:\d+: <lam",
        ),
    ],
)
def test_refuses_other_functions(tmp_path, decode, message):
    with pytest.raises((ConfigError, DataError), match=message):
        RecordSource(written(tmp_path), decode)


@pytest.mark.parametrize("kind", [str, Path, os.fsencode])
def test_one_path_is_not_read_letter_by_letter(tmp_path, kind):
    file = written(tmp_path)[0]
    message = rf"must be a list of paths, got the single path '{file}'. Pass \['{file}'\]"
    with pytest.raises(DataError, match=message):
        RecordSource(kind(file), decode)
    assert len(RecordSource([kind(file)], decode)) == LENGTHS[0]
