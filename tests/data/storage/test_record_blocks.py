"""Small records, read in blocks as TensorFlow reads them one by one; checksums and damage."""

import numpy as np
import pytest
import tensorflow as tf
from ddl.data.storage import record_blocks
from ddl.data.storage.checksums import masked_crc32c
from ddl.data.storage.record_blocks import RecordBlocks

import ddl
from ddl.errors import DataError

RANDOM = np.random.default_rng(0)
SIZES = [0, 1, 2, 3, 4, 5, 700, 4100, 9, 64, 4084, 33]
RECORDS = [RANDOM.bytes(size) for size in SIZES]


def written(folder, records=RECORDS, per_file=5):
    files, places = [], []
    for first in range(0, len(records), per_file):
        files.append(str(folder / f"part-{first}"))
        offset = 0
        with tf.io.TFRecordWriter(files[-1]) as writer:
            for record in records[first : first + per_file]:
                writer.write(record)
                places.append((len(files) - 1, offset))
                offset += len(record) + 16
    return files, *np.array(places).T


def test_checksums():
    """The value of RFC 3720, B.4, for 32 zeros, and strings of every length against bits."""

    def slow(data):
        crc = 0xFFFFFFFF
        for byte in data:
            crc ^= byte
            for _ in range(8):
                crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
        return crc ^ 0xFFFFFFFF

    assert slow(bytes(32)) == 0x8A9136AA
    strings = [RANDOM.bytes(size) for size in range(20)]
    rows = np.stack([np.frombuffer(s.rjust(25, b"\0"), np.uint8) for s in strings])
    found = masked_crc32c(rows, np.arange(20))
    crcs = np.array([slow(each) for each in strings])
    np.testing.assert_array_equal(found, ((crcs >> 15 | crcs << 17) + 0xA282EAD8) % 2**32)


@pytest.mark.parametrize("at_once", [1, 1 << 18])
def test_any_records_in_any_order(tmp_path, monkeypatch, at_once):
    monkeypatch.setattr(record_blocks, "_CHECKED_AT_ONCE", at_once)
    blocks = RecordBlocks(*written(tmp_path))
    order = np.array([7, 0, 11, 7, 3, 6, 10, 1, 2, 4])
    assert blocks.read(order).tolist() == [RECORDS[number] for number in order]


@pytest.mark.parametrize("place", [3, 9, 12, -1], ids=["length", "its sum", "data", "their sum"])
def test_damage_is_an_error_that_names_the_record(tmp_path, place):
    files, numbers, offsets = written(tmp_path)
    data = bytearray((tmp_path / "part-5").read_bytes())
    first, end = offsets[6], offsets[7]  # of the record of 700 bytes
    data[first + place if place >= 0 else end + place] ^= 1
    (tmp_path / "part-5").write_bytes(data)
    blocks = RecordBlocks(files, numbers, offsets)
    message = f"part-5 is damaged: the record at byte {first} .* Replace the file"
    with pytest.raises(DataError, match=message):
        blocks.read(np.arange(12))
    assert blocks.read(np.array([5, 8])).tolist() == [RECORDS[5], RECORDS[8]]


def test_a_file_that_became_shorter(tmp_path):
    blocks = RecordBlocks(*written(tmp_path))
    file = tmp_path / "part-5"
    file.write_bytes(file.read_bytes()[:300])
    with pytest.raises(DataError, match="part-5 is damaged: the record"):
        blocks.read(np.array([6]))


def decode(record, seed):
    drawn = tf.random.stateless_uniform([], seed, None, None, tf.int64)
    return {"length": tf.strings.length(record), "record": record, "drawn": drawn}


def test_a_source_reads_the_same_either_way(tmp_path, monkeypatch):
    files, *_ = written(tmp_path)
    batches = []
    for most in (record_blocks._MOST_MEAN, 0):
        monkeypatch.setattr(record_blocks, "_MOST_MEAN", most)
        source = ddl.data.RecordSource(files, decode)
        assert isinstance(source._records.blocks, RecordBlocks) == (most > 0)
        rows = np.array([4, 1, 2])
        made = source.batches(5, 1, seed=3, shuffle=True, rows=rows).take(6)
        batches.append(list(made.as_numpy_iterator()))
    for one, other in zip(*batches, strict=True):
        tf.nest.map_structure(np.testing.assert_array_equal, one, other)


def test_larger_records_are_read_elsewhere(tmp_path):
    files, *_ = written(tmp_path, [b"small"] * 40 + [RANDOM.bytes(17_000)], 50)
    blocks = ddl.data.RecordSource(files, decode)._records.blocks
    assert type(blocks).__name__ == "LargeRecords"
