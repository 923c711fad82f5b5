from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from ddl.data.storage.array_records import ArrayRecordBlocks

from ddl.data import RecordSource, record_files
from ddl.data.checks import data_errors
from ddl.errors import DataError
from tests.data.formats.test_record_features import FEATURES, example
from tests.data.test_records import decode, taken, written

pytest.importorskip("array_record")


def array_records(file, records):
    """Writes an ArrayRecord file and returns its path."""
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(file), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()
    return str(file)


def copied(source, folder, files=1):
    """Writes the records of a source into ArrayRecord files."""
    records = [source.record(tf.constant(index)).numpy() for index in range(len(source))]
    ends = [len(records) * number // files for number in range(files + 1)]
    return [
        array_records(folder / f"{number}.array_record", records[ends[number] : ends[number + 1]])
        for number in range(files)
    ]


def test_the_same_records_as_in_tf_record_files(tmp_path):
    source = RecordSource(written(tmp_path), decode)
    files = copied(source, tmp_path, files=2)
    again = RecordSource(files, decode)
    assert len(again) == len(source)
    for one, two in zip(taken(source, 5), taken(again, 5), strict=True):
        for name in one:
            np.testing.assert_array_equal(one[name], two[name])
    rows = np.array([3, 1])
    for whole, part in zip(taken(again, 4)[2:], taken(again, 2, first=2, rows=rows), strict=True):
        np.testing.assert_array_equal(part["x"], whole["x"][rows])
    assert len(RecordSource(files, decode, num_examples=3)) == 3


def test_a_batch_is_one_call_for_each_file(tmp_path):
    records = {}
    for file in "ab":
        records[file] = [file.encode() + bytes([n]) + b"\0" * n for n in range(5)]
        array_records(tmp_path / f"{file}.array_record", records[file])
    blocks = ArrayRecordBlocks([str(tmp_path / f"{file}.array_record") for file in "ab"])
    read = blocks.read(np.array([7, 0, 4, 9, 7]))
    (a, b) = records.values()
    assert read.tolist() == [b[2], a[0], a[4], b[4], b[2]]
    assert blocks.describe(7) == f"record 2 of {tmp_path / 'b.array_record'}"
    calls = []
    reader = blocks._readers[1]
    blocks._readers[1] = SimpleNamespace(read=lambda numbers: calls.append(numbers) or [b""] * 3)
    blocks.read(np.array([9, 1, 6, 5]))
    blocks._readers[1] = reader
    assert calls == [[4, 1, 0]]


def test_a_failure_of_the_system_is_no_damage(tmp_path):
    file = array_records(tmp_path / "a.array_record", [b"0", b"1", b"2"])
    blocks = ArrayRecordBlocks([file])

    def read(numbers):
        raise error

    blocks._readers[0] = SimpleNamespace(read=read)
    for error, raised in (
        (ConnectionResetError("reset"), ConnectionResetError),
        (ValueError("hash mismatch"), DataError),
    ):
        with pytest.raises(raised, match=str(error)):
            blocks.read(np.array([1, 0]))


def test_features_of_a_pattern(tmp_path):
    array_records(tmp_path / "a.array_record", map(example, range(4)))
    source = record_files(str(tmp_path / "*.array_record"), FEATURES)
    (batch,) = taken(source, 1, shuffle=False)
    assert batch["label"].tolist() == [0, 1, 2, 3]


def test_bad_files(tmp_path):
    source = RecordSource(written(tmp_path), decode)
    (file,) = copied(source, tmp_path)
    with pytest.raises(DataError, match="must be of one format, but .*array_record is an"):
        RecordSource([file, *written(tmp_path)], decode)
    with pytest.raises(DataError, match="absent.array_record' was not found"):
        RecordSource([str(tmp_path / "absent.array_record")], decode)
    content = bytearray(Path(file).read_bytes())
    for name, part in (("cut", content[: len(content) // 2]), ("text", b"image,label\n" * 9999)):
        (tmp_path / f"{name}.array_record").write_bytes(part)
        with pytest.raises(DataError, match=rf"{name}.array_record could not be read as an Array"):
            RecordSource([str(tmp_path / f"{name}.array_record")], decode)
    content[content.index(b"0003")] ^= 1  # in the middle of a record
    (tmp_path / "bad.array_record").write_bytes(content)
    bad = RecordSource([str(tmp_path / "bad.array_record")], decode)
    named = r"record \d of .*bad.array_record cannot be read: .*hash mismatch.*skip_damaged"
    with pytest.raises(DataError, match=named), data_errors(bad):
        taken(bad, 3)
