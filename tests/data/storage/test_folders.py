import json
import os

import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.data import ArraySource, RecordSource, store, stored
from ddl.data.checks import data_errors
from ddl.data.storage.tf_records import index_of, write_index
from ddl.errors import ConfigError, DataError
from tests.data.test_records import COUNT, decode, taken, written

FEATURES = {
    "image": np.arange(7 * 12, dtype=np.uint8).reshape(7, 2, 2, 3),
    "label": np.arange(7),
    "x": np.linspace(0, 1, 14, dtype=np.float64).reshape(7, 2),
    "flag": np.arange(7) % 2 == 0,
    "name": np.array([f"n{n}" for n in range(7)]),
    "pair": np.array([[b"a", b"bc"]] * 7),
    "weight": np.array([0, 1, 0.5, 1, 1, 1, 0], np.float32),
}


@pytest.mark.parametrize("shards", [1, 3])
def test_what_is_stored_is_read_again(tmp_path, shards):
    source, seen = ArraySource(FEATURES), []
    files = store(source, tmp_path / "new", shards=shards, progress=seen.append)
    assert len(files) == shards
    assert seen == [7]
    again = stored(tmp_path / "new")
    assert {k: (s.dtype, s.shape) for k, s in again.element_spec.items()} == {
        k: (s.dtype, s.shape) for k, s in source.element_spec.items()
    }
    for shuffle in (True, False):
        for one, two in zip(
            taken(source, 3, shuffle=shuffle), taken(again, 3, shuffle=shuffle), strict=True
        ):
            for name in one:
                np.testing.assert_array_equal(one[name], two[name], err_msg=name)
    some = stored(tmp_path / "new", num_examples=2)
    assert len(some) == 2
    store(some, tmp_path / "again")
    one, two = (
        next(iter(taken(each, 1, batch=2, shuffle=False)))
        for each in (some, stored(tmp_path / "again"))
    )
    for name in one:
        np.testing.assert_array_equal(one[name], two[name], err_msg=name)


def test_records_are_copied_as_they_are(tmp_path):
    source = RecordSource(written(tmp_path), decode)
    files = store(source, tmp_path / "new", shards=2)
    for one, two in zip(taken(source, 3), taken(RecordSource(files, decode), 3), strict=True):
        np.testing.assert_array_equal(one["x"], two["x"])
        np.testing.assert_array_equal(one["draw"], two["draw"])
    assert not (tmp_path / "new" / "features.json").exists()


def test_a_stream_in_shards(tmp_path):
    """Its padding stands in the middle of an epoch."""
    source = ddl.data.StreamSource(
        lambda epoch, shard: tf.data.Dataset.range(10 * shard, 10 * shard + 3 + 2 * shard).map(
            lambda x: {"x": x}
        ),
        [3, 5],
    )
    store(source, tmp_path / "new")
    (batch,) = taken(stored(tmp_path / "new"), 1, batch=8)
    assert sorted(batch["x"].tolist()) == [0, 1, 2, 10, 11, 12, 13, 14]


@pytest.mark.parametrize("change", ["none", "stale", "older", "damaged", "empty"])
def test_an_index_is_used_if_it_fits(tmp_path, change, monkeypatch):
    (file,) = written(tmp_path)[2:]
    other = written(tmp_path)[0]
    write_index(file)
    if change == "stale":
        write_index(other)
        (tmp_path / index_of(file)).write_bytes((tmp_path / index_of(other)).read_bytes())
    elif change == "older":
        os.utime(tmp_path / index_of(file), (1, 1))
    elif change != "none":
        (tmp_path / index_of(file)).write_bytes(b"cut" if change == "damaged" else b"")
    scanned = []
    from ddl.data.storage import tf_records

    located = tf_records._located
    monkeypatch.setattr(tf_records, "_located", lambda f: scanned.append(f) or located(f))
    source = RecordSource([file], decode)
    assert scanned == ([] if change == "none" else [file])
    x = np.concatenate([b["x"] for b in taken(source, 7, batch=1, shuffle=False)])
    np.testing.assert_array_equal(x, np.arange(4, COUNT))


def test_a_pattern_does_not_match_an_index(tmp_path):
    for file in written(tmp_path):
        write_index(file)
    assert len(tf.io.gfile.glob(str(tmp_path / "part-*"))) == 3


def missing(folder):
    (folder / "data-00001-of-00002.tfrecord").unlink()


def undescribed(folder):
    (folder / "features.json").unlink()


def cut(folder):
    file = folder / "data-00001-of-00002.tfrecord"
    file.write_bytes(file.read_bytes()[:-3])


def shorter(folder):
    described = json.loads((folder / "features.json").read_text())
    described["files"].pop()
    (folder / "features.json").write_text(json.dumps(described))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (missing, r"data-00001-of-00002.tfrecord was not found; .*features.json lists it"),
        (undescribed, r"features.json could not be read: .*Write the folder with python -m"),
        (cut, r"data-00001-of-00002.tfrecord is truncated"),
        (shorter, "must hold 7 examples, as features.json says, got 3"),
    ],
)
def test_a_folder_that_is_damaged(tmp_path, change, message):
    store(ArraySource(FEATURES), tmp_path / "new", shards=2)
    change(tmp_path / "new")
    with pytest.raises(DataError, match=f"(?s){message}"):
        stored(tmp_path / "new")


def test_what_cannot_be_stored(tmp_path):
    (tmp_path / "file").write_text("")
    source = ArraySource(FEATURES)
    with pytest.raises(ConfigError, match="must be a new or empty folder"):
        store(source, tmp_path)
    with pytest.raises(ConfigError, match="must be from 1 to 7, got 8"):
        store(source, tmp_path / "new", shards=8)
    with pytest.raises(DataError, match="'x' has dtype uint32, which cannot be stored"):
        store(ArraySource(x=np.arange(3, dtype=np.uint32)), tmp_path / "new")
    with pytest.raises(DataError, match="Data without a known length cannot be stored"):
        store(ddl.data.endless(lambda: iter([{"x": 1}]), steps_per_epoch=1), tmp_path / "new")
    mixed = ddl.data.Mixture(
        [{"x": [1.0, 2]}, {"x": [3.0]}], [0.5, 0.5], later_shares={1: [0.9, 0.1]}
    )
    with pytest.raises(ConfigError, match=r"later_shares\) cannot be stored.* mix what was stored"):
        store(mixed, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_weights_are_stored_as_batches_have_them(tmp_path, dtype):
    store(ArraySource(x=np.arange(3), weight=np.array([1, 0.5, 2], dtype)), tmp_path / "new")
    (batch,) = taken(stored(tmp_path / "new"), 1, batch=3, shuffle=False)
    np.testing.assert_array_equal(batch["weight"], np.array([1, 0.5, 2], "f4"))


def test_a_failure_leaves_no_file_that_looks_complete(tmp_path):
    def lookup(indices):
        return {"x": 1 / (indices - 5.0)}

    source = ddl.data.RandomAccessSource(lookup, 7)
    with (
        pytest.raises(DataError, match="NaN or infinity, first in example 5. Remove"),
        data_errors(),
        np.errstate(all="ignore"),
    ):
        store(source, tmp_path / "new")
    assert not list((tmp_path / "new").glob("*.tfrecord"))
    assert not (tmp_path / "new" / "features.json").exists()
