import re

import numpy as np
import pytest
import tensorflow as tf
from absl import logging as absl_logging

from ddl.data import (
    ImageFolder,
    RandomAccessSource,
    RecordSource,
    from_items,
    skip_damaged,
    subset,
)
from ddl.data.checks import data_errors
from ddl.errors import ConfigError, DataError
from tests.data.test_records import COUNT, decode, taken, written

BAD = (1, 9)


@pytest.fixture
def whole(tmp_path):
    (tmp_path / "whole").mkdir()
    return RecordSource(written(tmp_path / "whole"), decode)


@pytest.fixture
def source(tmp_path):
    """Records of which number 1 and number 9 have bad checksums."""
    (tmp_path / "damaged").mkdir()
    source = RecordSource(written(tmp_path / "damaged"), decode)
    for number in BAD:
        byte, name = re.search(r"byte (\d+) of .*(part-\d)", source.describe(number)).groups()
        file = tmp_path / "damaged" / name
        content = bytearray(file.read_bytes())
        content[int(byte) + 13] ^= 1
        file.write_bytes(content)
    return source


@pytest.fixture
def warnings(monkeypatch):
    found = []
    monkeypatch.setattr(absl_logging, "warning", lambda text, *values: found.append(text % values))
    return found


def test_damaged_examples_count_nothing_and_move_no_others(source, whole, warnings):
    tolerant = skip_damaged(source, limit=2)
    seen = {}
    for epoch in (0, 1):
        batches = taken(tolerant, 3, first=3 * epoch)
        x = np.concatenate([batch["x"] for batch in batches])
        weight = np.concatenate([batch["weight"] for batch in batches])
        assert sorted(x[weight > 0]) == [n for n in range(COUNT) if n not in BAD]
        seen[epoch] = batches
    for batch, expected in zip(seen[0], taken(whole, 3), strict=True):
        good = ~np.isin(expected["x"], BAD)
        for name in ("x", "draw", "weight"):
            np.testing.assert_array_equal(batch[name][good], expected[name][good])
        assert not batch["weight"][~good].any()
    assert len(warnings) == 2
    for number, text in enumerate(warnings, start=1):
        assert f"cannot be read and counts nothing (damaged example {number} of at most 2)" in text
    assert "the record at byte 18 of" in "".join(warnings)


def test_whole_records_are_read_by_the_batch(whole, monkeypatch):
    """Each is not read on its own, nor is a batch that could be read."""
    tolerant = skip_damaged(whole, limit=1)
    read_alone = []
    monkeypatch.setattr(
        type(tolerant),
        "_second_read",
        lambda self, index, seed: read_alone.append(index),
    )
    expected = taken(whole, 3)
    blocks = whole._records.blocks
    read, sizes = blocks.read, []
    monkeypatch.setattr(blocks, "read", lambda indices: sizes.append(len(indices)) or read(indices))
    for batch, other in zip(taken(tolerant, 3), expected, strict=True):
        for name in other:
            np.testing.assert_array_equal(batch[name], other[name], err_msg=name)
    assert len(sizes) >= 3
    assert min(sizes) > 1
    assert not read_alone


def test_one_more_than_the_limit_is_an_error_that_names_them(source, warnings):
    message = (
        r"2 examples cannot be read, more than skip_damaged.limit = 1: .*byte .*byte .*Replace"
    )
    with pytest.raises(DataError, match=message), data_errors():
        taken(skip_damaged(source, limit=1), 3)
    assert len(warnings) == 1


def test_beyond_the_limit_each_damaged_example_is_an_error(source):
    """A later batch, read ahead, may have found the one too many."""
    tolerant = skip_damaged(source, limit=1)
    tolerant._note(np.int64(9))
    for number in (1, 9, 1):
        with pytest.raises(DataError, match="2 examples cannot be read"):
            tolerant._note(np.int64(number))


def test_without_it_a_damaged_record_is_an_error_that_names_it(source):
    """One of the two: batches are read in parallel."""
    message = (
        r"(part-0 is damaged: the record at byte 18|part-2 is damaged: the record at byte 120) "
    )
    with pytest.raises(DataError, match=message), data_errors(source):
        taken(source, 3)


def test_weights_and_sources_of_python(warnings):
    items = [{"x": np.float32(n if n != 3 else np.nan), "weight": 0.5} for n in range(6)]
    (batch,) = taken(skip_damaged(from_items(items), limit=1), 1, batch=6, shuffle=False)
    assert batch["weight"].tolist() == [0.5, 0.5, 0.5, 0, 0.5, 0.5]
    assert warnings == [
        "example 3 cannot be read and counts nothing (damaged example 1 of at most 1). "
        "Replace it in the data, so that it counts."
    ]


def test_images(tmp_path, warnings):
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "1.png").write_bytes(tf.io.encode_png(np.full([4, 4, 1], 9, "u1")).numpy())
    (tmp_path / "cat" / "2.png").write_bytes(b"no image")
    source = skip_damaged(ImageFolder(tmp_path, (4, 4, 1)), limit=1)
    (batch,) = taken(source, 1, batch=2, shuffle=False)
    assert batch["weight"].tolist() == [1, 0]
    assert "2.png cannot be read" in warnings[0]


def test_a_failure_that_may_pass_is_no_damage(warnings):
    """An example that was read at the second try counts; otherwise the error stays."""
    failures = {2: 1, 4: 99}

    def lookup(indices):
        (number,) = indices.tolist()
        if failures.get(number):
            failures[number] -= 1
            raise ConnectionResetError("Connection reset by peer")
        return {"x": indices, "name": np.array([f"n{number}"], object)}

    source = skip_damaged(RandomAccessSource(lookup, 6), limit=3)
    (batch,) = taken(subset(source, first=4), 1, batch=4, shuffle=False)
    assert batch["x"].tolist() == [0, 1, 2, 3]
    assert batch["name"].tolist() == [b"n0", b"n1", b"n2", b"n3"]
    assert batch["weight"].tolist() == [1] * 4
    with pytest.raises(tf.errors.UnknownError, match="Connection reset by peer"):
        taken(source, 1, batch=6, shuffle=False)
    assert not warnings


def test_an_error_of_the_users_function_is_damage(warnings):
    def lookup(indices):
        (number,) = indices.tolist()
        return {"x": np.array([{0: 7, 2: 9}[number]]), "name": np.array(["n"], object)}

    (batch,) = taken(
        skip_damaged(RandomAccessSource(lookup, 3), limit=1), 1, batch=3, shuffle=False
    )
    assert batch["x"].tolist() == [7, 0, 9]
    assert batch["name"].tolist() == [b"n", b"", b"n"]
    assert batch["weight"].tolist() == [1, 0, 1]
    assert len(warnings) == 1


def test_bad_arguments(source):
    with pytest.raises(ConfigError, match="limit must be at least 1, got 0"):
        skip_damaged(source, limit=0)
    with pytest.raises(DataError, match="skip_damaged needs data whose examples are found"):
        skip_damaged(tf.data.Dataset.range(3).map(lambda x: {"x": x}), limit=1)
