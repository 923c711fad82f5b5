"""The definition of a sweep: saved, extended, refused."""

import dataclasses
import json

import pytest

from ddl.errors import ConfigError, ModelDirectoryError, NotReady
from ddl.sweep.definition import (
    Definition,
    base_bindings,
    extended,
    locked,
    read,
    write,
)

POINTS = [{"LR": "0.1", "SEED": "0"}, {"LR": "0.1", "SEED": "1"}, {"LR": "0.2", "SEED": "0"}]
SAVED = Definition({"STEPS": "10", "import os": "yes"}, POINTS, {"grid": ["LR = [0.1]"]})


def test_it_is_read_as_written(tmp_path):
    assert read(tmp_path / "missing") is None
    assert read(tmp_path) is None
    write(tmp_path, SAVED)
    assert read(tmp_path) == SAVED
    assert extended(tmp_path, SAVED, SAVED) == []
    content = json.loads((tmp_path / "sweep.json").read_text())
    assert content["runs"][2] == {"name": "LR=0.2,SEED=0", "bindings": POINTS[2]}


def test_settings_hold_the_runs_of_all_seeds():
    assert SAVED.settings == {
        "LR=0.1": ["LR=0.1,SEED=0", "LR=0.1,SEED=1"],
        "LR=0.2": ["LR=0.2,SEED=0"],
    }


def test_more_points_extend_a_sweep(tmp_path):
    more = dataclasses.replace(SAVED, points=[{"LR": "0.3", "SEED": "0"}, *reversed(POINTS)])
    assert extended(tmp_path, SAVED, more) == ["LR=0.3,SEED=0"]
    assert extended(tmp_path, None, SAVED) == list(SAVED.runs)


def test_fewer_points_are_refused(tmp_path):
    fewer = dataclasses.replace(SAVED, points=POINTS[:1])
    with pytest.raises(ConfigError, match="lack 2 of them: LR=0.1,SEED=1, LR"):
        extended(tmp_path, SAVED, fewer)


def test_another_base_is_refused(tmp_path):
    other = dataclasses.replace(SAVED, base={"STEPS": "20", "X": "1"})
    with pytest.raises(ConfigError) as error:
        extended(tmp_path, SAVED, other)
    lines = str(error.value).splitlines()
    assert lines[0].endswith("has another base config. The differences (saved → given):")
    assert lines[1:-1] == ["  STEPS: 10 → 20", "  import os: yes → not bound", "  X: not bound → 1"]


def test_the_base_has_no_swept_binding(tmp_path):
    config = tmp_path / "base.gin"
    config.write_text("include 'standard.gin'\nLR = 0.5\nSTEPS = 10\nf.a = %LR\nimport os\n")
    found = base_bindings([str(config)], ["STEPS = 2e1", "X = [1]"], (), POINTS)
    assert found == {"STEPS": "20.0", "X": "[1]", "f.a": "%LR", "import os": "yes"}


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"version": 9, "runs": [], "base": {}, "axes": {}}', "\xff"]
)
def test_a_damaged_definition_is_named(tmp_path, text):
    (tmp_path / "sweep.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelDirectoryError, match="cannot be read as the definition of a sweep"):
        read(tmp_path)


def test_a_folder_that_is_no_sweep_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ModelDirectoryError, match="which has the file sweep.json, but it holds no"):
        read(tmp_path)
    with pytest.raises(ModelDirectoryError, match="it is a file, or lies under one"):
        read(tmp_path / "notes.txt")


def test_two_sweeps_do_not_run_in_one_folder(tmp_path):
    with (
        locked(tmp_path / "new"),
        pytest.raises(NotReady, match="another ddl sweep runs there"),
        locked(tmp_path / "new"),
    ):
        pass
    with locked(tmp_path / "new"):
        pass
