"""The files of checkpoints: whole or not there, and any damage noticed."""

import json
import os
import re

import numpy as np
import pytest
import tensorflow as tf

from ddl.checkpoints.directory import CheckpointDirectory, Metadata, reading
from ddl.errors import ModelDirectoryError

TENSORS = {
    "model/0000": tf.constant(np.random.default_rng(0).normal(size=(100, 30)).astype("f4")),
    "model/0001": tf.constant(["alpha", "beta"]),
    "model/0002": tf.constant([3, 4], tf.uint32),
    "state/step": tf.constant(7, tf.int64),
}
VALUES = {k: (f"layer/{k}", list(v.shape), v.dtype.name) for k, v in TENSORS.items()}
VALUES["model/0002"] = ("dropout/seed_generator_state", [2], "uint32")


def write(folder, *steps, tensors=TENSORS, **fields):
    directory = CheckpointDirectory(folder)
    for step in steps:
        directory.write(step, tensors, Metadata(values=VALUES, **fields))
    return directory


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("name", ["a", "lr[0.1]", "a*b", "what?", "back\\slash", "~ ü ' \""])
def test_what_is_written_is_what_tensorflow_reads(tmp_path, name):
    directory = write(tmp_path / name, 3, 10, metrics={"accuracy": 0.5})
    first, second = directory.saved()
    assert (first.step, second.step) == (3, 10)
    assert first.metadata.metrics == {"accuracy": 0.5}
    assert directory.damage_of(first) == ""
    with reading(first.prefix) as reader:
        np.testing.assert_array_equal(reader.get_tensor("model/0000"), TENSORS["model/0000"])
    listed = json.loads((tmp_path / name / "step-3.json").read_text())["values"]
    assert listed["model/0000"] == ["layer/model/0000", [100, 30], "float32"]


def test_equal_runs_have_equal_digests(tmp_path):
    """Neither state nor seed generators count; texts do by their bytes, not their addresses."""

    def digest(folder, **changed):
        return write(tmp_path / folder, 1, tensors={**TENSORS, **changed}).at(1).metadata.sha256

    first = digest("first")
    assert digest("other step", **{"state/step": tf.constant(8, tf.int64)}) == first
    assert digest("other seed", **{"model/0002": tf.constant([1, 2], tf.uint32)}) == first
    assert digest("same texts", **{"model/0001": tf.constant(["alpha", "beta"])}) == first
    assert digest("other text", **{"model/0001": tf.constant(["alpha", "gamma"])}) != first


@pytest.mark.parametrize("calls_before", range(9))
def test_a_crash_between_any_two_calls_leaves_the_one_before(tmp_path, monkeypatch, calls_before):
    """Each call that writes is once the last one that the process makes."""
    directory = write(tmp_path, 1)
    calls = []

    class Crash(BaseException):
        pass

    def counted(function):
        def call(*arguments, **keywords):
            if len(calls) == calls_before:
                raise Crash
            calls.append(function)
            return function(*arguments, **keywords)

        return call

    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    monkeypatch.setattr(tf.raw_ops, "SaveV2", counted(tf.raw_ops.SaveV2))
    with pytest.raises(Crash):
        write(tmp_path, 2)
    monkeypatch.undo()
    there = [each.step for each in directory.saved()]
    assert there == ([1, 2] if calls_before == 8 else [1])
    assert not any(map(directory.damage_of, directory.saved()))
    directory.clear_partial()
    left = {re.sub(r"\..*", "", name) for name in names(tmp_path)}
    assert left == {f"step-{step}" for step in there}


@pytest.mark.parametrize("end", ["index", "data-00000-of-00001", "json"])
def test_any_byte_that_is_missing_or_changed_is_noticed(tmp_path, end):
    """Or harmless: the index has some 50 bytes of padding."""
    directory = write(tmp_path, 1)
    path = tmp_path / f"step-1.{end}"
    content = path.read_bytes()
    places = range(0, len(content), 97 if end.startswith("data") else 5)
    noticed = 0
    for place in places:
        path.write_bytes(content[:place])
        assert directory.damage_of(directory.at(1))
        path.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        if directory.damage_of(directory.at(1)):
            noticed += 1
        else:
            value = tf.train.load_checkpoint(str(tmp_path / "step-1")).get_tensor("model/0000")
            np.testing.assert_array_equal(value, TENSORS["model/0000"])
    assert noticed >= len(places) - (12 if end == "index" else 0)
    path.unlink()
    path.symlink_to("/proc/self/mem")  # whose reads the system fails, and which may be whole
    with pytest.raises(ModelDirectoryError, match=r"step-1 cannot .*Errno 5"):
        directory.newest(moves=True)
    path.unlink()
    assert directory.newest() is None if end == "index" else directory.damage_of(directory.at(1))
