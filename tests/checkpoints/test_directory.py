import dataclasses
import hashlib
import os
import re
import shutil

import numpy as np
import pytest
import tensorflow as tf

from ddl.checkpoints.directory import CheckpointDamagedError, CheckpointDirectory, Metadata
from ddl.errors import ModelDirectoryError

# Text that a reader of checkpoints asks for, and numbers enough for several blocks.
TENSORS = {
    "_CHECKPOINTABLE_OBJECT_GRAPH": tf.constant(b"graph"),
    "weights": tf.constant(np.random.default_rng(0).normal(size=(100, 30)).astype("f4")),
    "step": tf.constant(7, tf.int64),
}


def write(folder, *steps, metadata=Metadata()):  # noqa: B008
    directory = CheckpointDirectory(folder)
    for step in steps:
        directory.write(step, TENSORS, metadata)
    return directory


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_is_written_is_what_tensorflow_reads(tmp_path):
    metadata = Metadata({"accuracy": 0.5}, 64, 1000, 2, 3.25, False)
    directory = write(tmp_path, 3, 10, metadata=metadata)
    assert [each.step for each in directory.saved()] == [3, 10]
    found = directory.saved()[0].metadata
    digest = hashlib.sha256()
    for name in ("step", "weights"):  # not the object graph
        digest.update(name.encode() + b"\0" + TENSORS[name].numpy().tobytes())
    assert found == dataclasses.replace(metadata, sha256=digest.hexdigest())
    assert tf.train.latest_checkpoint(str(tmp_path)) == str(tmp_path / "step-10")
    state = tf.train.get_checkpoint_state(str(tmp_path))
    assert [os.path.basename(p) for p in state.all_model_checkpoint_paths] == ["step-3", "step-10"]
    reader = tf.train.load_checkpoint(str(tmp_path))
    np.testing.assert_array_equal(reader.get_tensor("weights"), TENSORS["weights"].numpy())
    assert names(tmp_path) == [
        "checkpoint",
        *[f"step-{n}.{end}" for n in (10, 3) for end in ("data-00000-of-00001", "index", "json")],
    ]


def test_the_list_moves_with_its_folder(tmp_path):
    write(tmp_path / "one", 1)
    shutil.move(tmp_path / "one", tmp_path / "two")
    assert tf.train.latest_checkpoint(str(tmp_path / "two")) == str(tmp_path / "two" / "step-1")


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

    for name in ("os.fsync", "os.replace"):
        monkeypatch.setattr(name, counted(getattr(os, name.split(".")[1])))
    monkeypatch.setattr(tf.raw_ops, "SaveV2", counted(tf.raw_ops.SaveV2))
    with pytest.raises(Crash):
        directory.write(2, TENSORS, Metadata())
    monkeypatch.undo()
    after = CheckpointDirectory(tmp_path)
    there = [each.step for each in after.saved()]
    assert there == ([1, 2] if calls_before == 8 else [1])
    for each in after.saved():
        after.check(each)
    after.clear_partial()
    after.write_list()
    assert {re.sub(r"\..*", "", name) for name in names(tmp_path)} == {
        "checkpoint",
        *(f"step-{step}" for step in there),
    }
    after.write(2, TENSORS, Metadata())
    assert [each.step for each in after.saved()] == [1, 2]


@pytest.mark.parametrize("end", ["index", "data-00000-of-00001", "json"])
def test_any_byte_that_is_missing_or_changed_is_noticed(tmp_path, end):
    """Or harmless: the index has some 50 bytes of padding."""
    directory = write(tmp_path, 1)
    (saved,) = directory.saved()
    path = tmp_path / f"step-1.{end}"
    content = path.read_bytes()
    places = range(0, len(content), 97 if end.startswith("data") else 1)
    noticed = 0
    for place in places:
        path.write_bytes(content[:place])
        with pytest.raises(CheckpointDamagedError):
            directory.check(saved)
        path.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        try:
            directory.check(saved)
        except CheckpointDamagedError:
            noticed += 1
        else:
            value = tf.train.load_checkpoint(saved.prefix).get_tensor("weights")
            np.testing.assert_array_equal(value, TENSORS["weights"].numpy())
    assert noticed >= len(places) - (60 if end == "index" else 0)


def test_one_that_lost_its_data_is_damaged(tmp_path):
    directory = write(tmp_path, 1)
    (tmp_path / "step-1.data-00000-of-00001").unlink()
    with pytest.raises(CheckpointDamagedError):
        directory.check(directory.saved()[0])


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe{}", 200 * b"\0", b"null", b'{"crc32": 0}', 100_000 * b"["],
    ids=["empty", "cut", "binary", "NUL", "null", "checksum", "nested"],
)
def test_one_whose_json_is_rubbish_is_damaged(tmp_path, content):
    directory = write(tmp_path, 1)
    (tmp_path / "step-1.json").write_bytes(content)
    (saved,) = directory.saved()
    with pytest.raises(CheckpointDamagedError, match="its JSON file is"):
        directory.check(saved)


def test_one_without_json_can_be_read(tmp_path):
    """As those of others are."""
    directory = write(tmp_path, 1, metadata=Metadata({"accuracy": 1.0}))
    (tmp_path / "step-1.json").unlink()
    (saved,) = directory.saved()
    directory.check(saved)
    assert saved.metadata == Metadata()


def test_damaged_ones_are_set_aside_and_none_is_lost(tmp_path):
    directory = write(tmp_path, 1, 2)
    first = directory.set_aside(directory.saved()[-1])
    assert names(first) == ["step-2.data-00000-of-00001", "step-2.index", "step-2.json"]
    assert tf.train.latest_checkpoint(str(tmp_path)) == str(tmp_path / "step-1")
    write(tmp_path, 2)
    second = directory.set_aside(directory.saved()[-1])
    assert second != first
    assert names(tmp_path / "damaged") == ["step-2", "step-2.2"]


@pytest.mark.parametrize("calls_before", [1, 2])
def test_a_crash_while_it_is_set_aside_loses_nothing(tmp_path, monkeypatch, calls_before):
    directory = write(tmp_path, 1, 2)
    content = {path.name: path.read_bytes() for path in tmp_path.glob("step-2.*")}
    replace, calls = os.replace, []

    class Crash(BaseException):
        pass

    def counted(*arguments):
        if len(calls) == calls_before:
            raise Crash
        calls.append(arguments)
        replace(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr("os.replace", counted)
        with pytest.raises(Crash):
            directory.set_aside(directory.saved()[-1])
    after = CheckpointDirectory(tmp_path)
    for saved in after.saved()[1:]:
        with pytest.raises(CheckpointDamagedError):
            after.check(saved)
        after.set_aside(saved)
    after.clear_partial()
    found = {path.name: path.read_bytes() for path in tmp_path.rglob("step-2.*") if path.is_file()}
    assert found == content


def test_one_that_cannot_be_set_aside_is_an_error(tmp_path):
    directory = write(tmp_path, 1)
    (tmp_path / "damaged").write_text("a file is in the way")
    with pytest.raises(ModelDirectoryError, match=r"step-1 is damaged and could not be moved"):
        directory.set_aside(directory.saved()[0])


def test_a_folder_that_may_not_be_read_is_not_empty(tmp_path, monkeypatch):
    directory = write(tmp_path, 1)

    def denied(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "listdir", denied)
    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(ModelDirectoryError, match="cannot be read: Permission denied. Change"):
        directory.saved()
    monkeypatch.undo()
    assert CheckpointDirectory(tmp_path / "absent").saved() == []
    assert CheckpointDirectory(tmp_path / "checkpoint").saved() == []  # a file


def test_removal(tmp_path):
    directory = write(tmp_path, 1, 2, 12)
    directory.remove([each for each in directory.saved() if each.step != 12])
    assert [each.step for each in directory.saved()] == [12]
    assert len(names(tmp_path)) == 4
    assert tf.train.latest_checkpoint(str(tmp_path)) == str(tmp_path / "step-12")


def test_a_disk_without_room_is_reported_before_anything_is_written(tmp_path, monkeypatch):
    directory = write(tmp_path, 1)
    usage = shutil.disk_usage(tmp_path)._replace(free=10_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(tf.raw_ops, "SaveV2", None)
    with pytest.raises(ModelDirectoryError, match=r"needs 0.0 MB, but 0.0 MB are free"):
        directory.write(2, TENSORS, Metadata())
    assert [each.step for each in directory.saved()] == [1]
    assert not list(tmp_path.glob("step-2*"))


def test_a_failure_in_a_save_leaves_nothing_of_it(tmp_path, monkeypatch):
    directory = write(tmp_path, 1)
    before = names(tmp_path)

    def full(**arguments):
        (tmp_path / "step-2.partial" / "step-2.data-00000-of-00001").write_text("half")
        raise tf.errors.ResourceExhaustedError(None, None, "…; No space left on device")

    monkeypatch.setattr(tf.raw_ops, "SaveV2", full)
    with pytest.raises(ModelDirectoryError, match="step 2 could not be written.*No space left"):
        directory.write(2, TENSORS, Metadata())
    assert names(tmp_path) == before


def test_files_of_others_are_left_alone(tmp_path):
    directory = write(tmp_path, 1)
    for name in ("step-x.index", "step-2.txt", "notes", "step-3"):
        (tmp_path / name).write_text("mine")
    directory.clear_partial()
    directory.remove(directory.saved())
    assert names(tmp_path) == ["checkpoint", "notes", "step-2.txt", "step-3", "step-x.index"]
