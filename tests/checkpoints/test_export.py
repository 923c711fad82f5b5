"""What an export needs to be loaded, Keras alone, and what a kill within one leaves."""

import errno
import json
import os
import shutil
import signal
import sys
import zipfile
from pathlib import Path

import keras
import numpy as np
import pytest

import ddl
from ddl.checkpoints import durable_files
from ddl.checkpoints.export import export_model
from ddl.errors import ConfigError, ModelDirectoryError


def test_layers_that_keras_has_too_need_keras_alone(tmp_path):
    tokens = keras.Input((4, 6))
    x = keras.layers.MultiHeadAttention(2, 3, dropout=0.4)(tokens, tokens)
    x = keras.layers.Bidirectional(keras.layers.LSTM(3, dropout=0.4))(keras.layers.Dropout(0.5)(x))
    model = keras.Model(tokens, x)
    path, _ = export_model(model, tmp_path / "export")
    with zipfile.ZipFile(path) as file:
        assert "ddl" not in json.dumps(json.loads(file.read("config.json")))
    inputs = np.random.default_rng(0).normal(size=(2, 4, 6))
    for loaded in (keras.models.load_model(path), ddl.models.load_exported(path)):
        np.testing.assert_allclose(loaded(inputs), model(inputs), rtol=1e-6)


class _WithoutConfig(keras.Model):
    def __init__(self, width):
        super().__init__()
        self.dense = keras.layers.Dense(width)

    def call(self, x):
        return self.dense(x)


def test_a_class_without_get_config_is_named(tmp_path):
    model = _WithoutConfig(3)
    model(np.zeros((1, 2)))
    with pytest.raises(ConfigError, match="_WithoutConfig has arguments and no get_config. Give"):
        export_model(model, tmp_path / "export")
    assert list(tmp_path.iterdir()) == []


class _Stub:
    """Writes files as a Keras model does: one archive, and a folder with a folder in it."""

    def __init__(self, content: str):
        self.content = content

    def save(self, path):
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("config.json", json.dumps({"is": self.content}))

    def export(self, folder, verbose):
        (Path(folder) / "variables").mkdir(parents=True)
        for name in ("saved_model.pb", "variables/index", "variables/data"):
            (Path(folder) / name).write_text(self.content)


def test_the_directory_may_be_a_text(tmp_path):
    model, saved_model = export_model(_Stub("new"), str(tmp_path / "export"))
    assert (model, saved_model.is_dir()) == (tmp_path / "export" / "model.keras", True)


def _exported(directory: Path) -> str | None:
    """What a whole export at `directory` holds; None if nothing is there at all."""
    if not directory.exists():
        return None
    saved_model = directory / "saved_model"
    assert sorted(path.name for path in directory.iterdir()) == ["model.keras", "saved_model"]
    assert sorted(path.name for path in saved_model.iterdir()) == ["saved_model.pb", "variables"]
    with zipfile.ZipFile(directory / "model.keras") as file:
        (content,) = json.loads(file.read("config.json")).values()
    for name in ("saved_model.pb", "variables/index", "variables/data"):
        assert (saved_model / name).read_text() == content
    return content


def _killed_at(step: int, model: _Stub, directory: Path) -> bool:
    """Exports in a process that is killed before its n-th step on files; whether it came to it."""
    child = os.fork()
    if child == 0:
        to_come = step

        def count(event, arguments):
            nonlocal to_come
            if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"):
                to_come -= 1
                if to_come < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        try:
            sys.addaudithook(count)
            export_model(model, directory)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def _no_exchange(*paths):
    raise OSError(errno.EINVAL, "no exchange of names here")


@pytest.mark.parametrize("exchanges", [True, False])
@pytest.mark.parametrize("replaces", [True, False])
def test_killed_at_any_step_a_whole_export_is_left(tmp_path, monkeypatch, exchanges, replaces):
    if not exchanges:
        monkeypatch.setattr("ddl.checkpoints.durable_files._exchange", _no_exchange)
    seen, step, killed = set(), 0, True
    while killed:
        directory = tmp_path / str(step) / "export"
        directory.parent.mkdir()
        if replaces:
            export_model(_Stub("old"), directory)
        killed = _killed_at(step, _Stub("new"), directory)
        found = _exported(directory)
        seen.add(found)
        if replaces and exchanges:
            assert found is not None
        # Whatever the next export comes to, it brings back what was there.
        with pytest.raises(AttributeError):
            export_model(None, directory)
        recovered = _exported(directory)
        assert recovered == (found or ("old" if replaces else None))
        export_model(_Stub("next"), directory)
        assert _exported(directory) == "next"
        assert [path.name for path in directory.parent.iterdir()] == ["export"]
        step += 1
    assert step > 20
    assert {"old", "new"} <= seen if replaces else {None, "new"} == seen


def test_an_export_is_on_the_disk_before_it_replaces_another(tmp_path, monkeypatch):
    """What a power cut leaves: files that were brought to the disk, and names in such folders."""
    directory = tmp_path / "export"
    export_model(_Stub("old"), directory)
    synced, at_exchange = set(), []

    def fsync(descriptor):
        synced.add(os.fstat(descriptor).st_ino)

    def exchange(new, old):
        at_exchange.extend(path.stat().st_ino for path in [new, *new.rglob("*")])
        assert set(at_exchange) <= synced
        synced.clear()
        swap(new, old)

    swap = durable_files._exchange
    monkeypatch.setattr("os.fsync", fsync)
    monkeypatch.setattr("ddl.checkpoints.durable_files._exchange", exchange)
    remove = shutil.rmtree

    def rmtree(path, **keywords):
        if path.exists() and at_exchange:
            assert tmp_path.stat().st_ino in synced
        remove(path, **keywords)

    monkeypatch.setattr("shutil.rmtree", rmtree)
    export_model(_Stub("new"), directory)
    assert len(at_exchange) == 7
    assert _exported(directory) == "new"


def test_one_export_at_a_time(tmp_path):
    directory = tmp_path / "export"
    export_model(_Stub("old"), directory)

    class Slow(_Stub):
        def save(self, path):
            super().save(path)
            with pytest.raises(ModelDirectoryError, match="Another process is exporting to"):
                export_model(_Stub("other"), directory)

    export_model(Slow("new"), directory)
    assert _exported(directory) == "new"


def test_an_export_through_a_link(tmp_path):
    (tmp_path / "export").symlink_to(tmp_path / "elsewhere")
    for content in ("old", "new"):
        paths = export_model(_Stub(content), tmp_path / "export")
        assert paths == [tmp_path / "export" / name for name in ("model.keras", "saved_model")]
        assert _exported(tmp_path / "elsewhere") == content
    assert (tmp_path / "export").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "export"]


def test_a_file_in_the_place_of_an_export_stays(tmp_path):
    (tmp_path / "export").write_text("mine")
    with pytest.raises(ModelDirectoryError, match="export is a file, not a directory"):
        export_model(_Stub("new"), tmp_path / "export")
    assert (tmp_path / "export").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["export"]
