"""The config of a resumed run, beside the saved one."""

import types
from pathlib import Path

import keras
import pytest

from ddl import config
from ddl.config import usage
from ddl.run.checks.config_changes import compare_with_saved_config

GIN = Path(__file__).parents[3] / "configs" / "digits_mlp.gin"


@pytest.fixture(autouse=True)
def all_is_used(monkeypatch):
    """As after a run was built."""
    monkeypatch.setattr(usage, "unused_defaults", lambda *_: [])


def compare(strict, *params):
    """Compares a config with that of a run with one microbatch; returns what is printed."""
    config.load([str(GIN)])
    saved = config.config_text()
    config.load([str(GIN)], params)
    directory = types.SimpleNamespace(path="run", config="config.gin", saved_config=lambda: saved)
    arguments = {"optimizer": keras.optimizers.SGD(), "training_layers": []}
    trainer = types.SimpleNamespace(**arguments)
    lines = []
    console = types.SimpleNamespace(line=lines.append)
    compare_with_saved_config(directory, trainer, console, strict)
    return lines


def test_the_number_of_microbatches_may_change():
    assert compare(True, "ACCUMULATION_STEPS = 2") == []
    assert compare(False, "ACCUMULATION_STEPS = 2") == []  # an evaluation
