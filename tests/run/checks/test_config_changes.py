"""The config of a resumed run, beside the saved one."""

import types
from pathlib import Path

import keras
import pytest
from ddl.run.checks.config_changes import compare_with_saved_config

from ddl import config
from ddl.errors import ModelDirectoryError

GIN = Path(__file__).parents[3] / "configs" / "digits_mlp.gin"


def operative_text(*params):
    """The operative config of a run that has built its plan."""
    config.load([str(GIN)], params)
    config.build("RunPlan")
    config.build("global_batch_size")
    return config.operative_config_text()


def compare(strict, *params):
    """Compares a config with that of a run without `params`; returns what is printed."""
    saved = operative_text()
    operative_text(*params)
    directory = types.SimpleNamespace(
        path="run", operative_config="operative_config.gin", saved_config=lambda: saved
    )
    arguments = {"optimizer": keras.optimizers.SGD(), "training_layers": []}
    lines = []
    console = types.SimpleNamespace(line=lines.append)
    compare_with_saved_config(directory, types.SimpleNamespace(**arguments), console, strict)
    return lines


def test_the_periods_may_change_and_the_batch_may_not():
    assert compare(True, "LOG_EVERY = 7") == []
    with pytest.raises(ModelDirectoryError, match="GLOBAL_BATCH_SIZE: 64 → 32"):
        compare(True, "GLOBAL_BATCH_SIZE = 32")
    assert "GLOBAL_BATCH_SIZE: 64 → 32" in compare(False, "GLOBAL_BATCH_SIZE = 32")[0]
