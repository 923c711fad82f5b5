"""Records of some kilobytes, read by batch as TensorFlow reads them one by one; damage."""

import os
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from ddl.data.storage import large_records
from ddl.data.storage.large_records import LargeRecords

import ddl
from ddl.errors import DataError
from tests.data.storage.test_record_blocks import decode, written

RANDOM = np.random.default_rng(0)
RECORDS = [RANDOM.bytes(size) + b"\0" for size in RANDOM.integers(5_000, 60_000, size=[40])]


def test_any_records_in_any_order(tmp_path):
    records = LargeRecords(*written(tmp_path, RECORDS, 7))
    for count in (0, 1, 40, 200):
        order = RANDOM.integers(40, size=[count])
        assert records.read(order).tolist() == [RECORDS[number] for number in order]


def test_only_the_wanted_records_are_read(tmp_path):
    """TensorFlow's reader alone reads 16 MiB from each record on, here the rest of the file."""
    records = LargeRecords(*written(tmp_path, RECORDS, 40))

    def bytes_read():
        return int(Path("/proc/self/io").read_text().split()[1])  # also from the page cache

    records.read(np.array([0]))
    before = bytes_read()
    assert records.read(np.array([0, 1])).tolist() == RECORDS[:2]
    assert bytes_read() - before < 5 * 60_000 < sum(map(len, RECORDS)) // 3


def test_all_records_are_requested_before_the_first_is_read(tmp_path, monkeypatch):
    files, numbers, offsets = written(tmp_path, RECORDS, 7)
    calls = []
    request, read = os.posix_fadvise, os.pread
    monkeypatch.setattr(os, "posix_fadvise", lambda *a: (calls.append(a[1:]), request(*a)))
    monkeypatch.setattr(os, "pread", lambda *a: (calls.append("read"), read(*a))[1])
    LargeRecords(files, numbers, offsets).read(np.array([30, 2, 6]))
    last_of_file = offsets[6], large_records._MOST_MEAN
    found = [(offsets[2], offsets[3] - offsets[2]), last_of_file]
    found.append((offsets[30], offsets[31] - offsets[30]))
    assert calls[:4] == [*((*each, os.POSIX_FADV_WILLNEED) for each in found), "read"]


def test_no_file_stays_open(tmp_path):
    files, numbers, offsets = written(tmp_path, RECORDS, 7)
    (tmp_path / "part-35").write_bytes(b"")
    records = LargeRecords(files, numbers, offsets)
    records.read(np.arange(35))  # loads what TensorFlow loads once
    before = os.listdir("/proc/self/fd")
    records.read(np.arange(35))
    with pytest.raises(DataError, match="part-35 is damaged"):
        records.read(np.arange(40))
    assert os.listdir("/proc/self/fd") == before


def test_a_system_without_files_in_memory(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    files, *_ = written(tmp_path, RECORDS, 40)
    assert ddl.data.RecordSource(files, decode)._records.blocks is None


@pytest.mark.parametrize("place", [3, 9, 12, -1], ids=["length", "its sum", "data", "their sum"])
def test_damage_is_an_error_that_names_the_record(tmp_path, place):
    files, numbers, offsets = written(tmp_path, RECORDS, 7)
    data = bytearray((tmp_path / "part-7").read_bytes())
    data[offsets[9] + place if place >= 0 else offsets[10] + place] ^= 1
    (tmp_path / "part-7").write_bytes(data)
    records = LargeRecords(files, numbers, offsets)
    message = f"part-7 is damaged: the record at byte {offsets[9]:,} .* Replace the file"
    with pytest.raises(DataError, match=message):
        records.read(np.arange(40))
    assert records.read(np.array([8, 10])).tolist() == [RECORDS[8], RECORDS[10]]


def test_files_that_became_shorter_or_went_away(tmp_path):
    records = LargeRecords(*written(tmp_path, RECORDS, 7))
    file = tmp_path / "part-7"
    file.write_bytes(file.read_bytes()[:300])
    with pytest.raises(DataError, match="part-7 (is damaged|could not be read)"):
        records.read(np.array([9]))
    file.unlink()
    with pytest.raises(DataError, match="part-7 could not be read.* still exists"):
        records.read(np.array([9]))


def test_a_source_reads_the_same_either_way(tmp_path, monkeypatch):
    files, *_ = written(tmp_path, RECORDS, 7)
    batches = []
    for most in (large_records._MOST_MEAN, 0):
        monkeypatch.setattr(large_records, "_MOST_MEAN", most)
        source = ddl.data.RecordSource(files, decode)
        assert isinstance(source._records.blocks, LargeRecords) == (most > 0)
        rows = np.array([4, 1, 2])
        made = source.batches(5, 1, seed=3, shuffle=True, rows=rows).take(10)
        batches.append(list(made.as_numpy_iterator()))
    for one, other in zip(*batches, strict=True):
        tf.nest.map_structure(np.testing.assert_array_equal, one, other)


def test_a_damaged_record_is_left_out(tmp_path):
    files, _, offsets = written(tmp_path, RECORDS, 40)
    data = bytearray((tmp_path / "part-0").read_bytes())
    data[offsets[9] + 3_000] ^= 1
    (tmp_path / "part-0").write_bytes(data)
    source = ddl.data.skip_damaged(ddl.data.RecordSource(files, decode), limit=2)
    (rows,) = source.batches(8, 1, seed=3, shuffle=False).take(1).as_numpy_iterator()
    assert rows["weight"].tolist() == [1, 0, 1, 1, 1, 1, 1, 1]
    assert rows["record"][0] == RECORDS[8]


def test_the_largest_records_are_read_one_by_one(tmp_path):
    files, *_ = written(tmp_path, [RANDOM.bytes(300_000)] * 3)
    assert ddl.data.RecordSource(files, decode)._records.blocks is None
