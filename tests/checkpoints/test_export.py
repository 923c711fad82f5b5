"""What an export needs to be loaded, Keras alone, and what a kill within one leaves."""

import os
import signal
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

from ddl.checkpoints.export import export_model
from ddl.errors import ConfigError, ModelDirectoryError


class _WithoutConfig(keras.Model):
    def __init__(self, width):
        super().__init__()
        self.dense = keras.layers.Dense(width)

    def call(self, x):
        return self.dense(x)


def test_a_class_without_get_config_is_named(tmp_path):
    model = _WithoutConfig(3)
    model(np.zeros((1, 2)))
    with pytest.raises(ConfigError, match="needs the constructor arguments .*_WithoutConfig"):
        export_model(model, tmp_path / "export")
    assert list(tmp_path.iterdir()) == []


class _Stub:
    """Writes files as a Keras model does: one archive, and a folder with a folder in it."""

    def __init__(self, content: str):
        self.content = content

    def __call__(self, x):
        return x

    def save(self, path):
        path.write_text(self.content)

    def export(self, folder, **_):
        (Path(folder) / "variables").mkdir(parents=True)
        for name in ("saved_model.pb", "variables/index", "variables/data"):
            (Path(folder) / name).write_text(self.content)


def _exported(directory: Path) -> str | None:
    """What a whole export at `directory` holds; None if nothing is there at all."""
    if not directory.exists():
        return None
    content = (directory / "model.keras").read_text()
    for name in ("saved_model.pb", "variables/index", "variables/data"):
        assert (directory / "saved_model" / name).read_text() == content
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


def test_killed_at_any_step_a_whole_export_is_left(tmp_path):
    seen, step, killed = set(), 0, True
    while killed:
        directory = tmp_path / str(step) / "export"
        directory.parent.mkdir()
        export_model(_Stub("old"), directory)
        killed = _killed_at(step, _Stub("new"), directory)
        seen.add(found := _exported(directory))
        if found is None:  # between two renames
            (old,) = directory.parent.glob("export.partial-*/replaced")
            assert _exported(old) == "old"
        export_model(_Stub("next"), directory)
        assert _exported(directory) == "next"
        step += 1
    assert step > 15
    assert seen == {"old", None, "new"}


def test_an_export_through_a_link_and_onto_a_file(tmp_path):
    (tmp_path / "export").symlink_to(tmp_path / "elsewhere")
    for content in ("old", "new"):
        export_model(_Stub(content), tmp_path / "export")
        assert _exported(tmp_path / "elsewhere") == content
    assert (tmp_path / "export").is_symlink()
    (tmp_path / "elsewhere" / "metrics.jsonl").write_text("of a run")
    with pytest.raises(ModelDirectoryError, match="would replace .*, which holds metrics.jsonl"):
        export_model(_Stub("newer"), tmp_path / "export")
    assert (tmp_path / "elsewhere" / "model.keras").read_text() == "new"
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ModelDirectoryError, match="file is a file, not a directory"):
        export_model(_Stub("new"), tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"
