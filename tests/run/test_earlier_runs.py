"""A run folder written before the modules had rooms: it resumes, evaluates, exports and repeats.

`earlier_run` is what 20 steps of `digits_mlp.gin` with 4 hidden units wrote on one device.
"""

import shutil
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl import config
from ddl.distribution import Communication
from ddl.run import train
from ddl.run.placement import Placement
from tests.conftest import make_strategy
from tests.run.test_train import metrics

EARLIER = Path(__file__).parent / "earlier_run"

# The last line of the same run, of 40 steps, by the code of then.
LOSS_AT_40, ACCURACY_AT_40 = 1.5388432554072804, 0.6222222222222222


COMMAND = (
    *("mlp.hidden_units = (4,)", "SEED = 5", "TRAIN_EPOCHS = None", "TRAIN_STEPS = 20"),
    *("CHECKPOINT_EVERY = 10", "Retention.last = 1"),
)


def run(model_dir, *params, config_file="digits_mlp.gin", **arguments):
    config.load([str(config_file)], list(params))
    placement = Placement(make_strategy("one_device", 1), Communication())
    train.run(placement, str(model_dir), **arguments)


@pytest.fixture
def model_dir(tmp_path):
    return shutil.copytree(EARLIER, tmp_path / "run")


def test_resumes(model_dir, capsys):
    run(model_dir, *COMMAND, "TRAIN_STEPS = 40")
    assert "Restored step 20 from" in capsys.readouterr().out
    last = metrics(model_dir, "eval")[-1]
    assert last["step"] == 40
    assert last["loss"] == pytest.approx(LOSS_AT_40, rel=1e-5)
    assert last["accuracy"] == pytest.approx(ACCURACY_AT_40, abs=1e-3)


def test_repeats_by_its_operative_config(tmp_path):
    run(tmp_path / "again", config_file=EARLIER / "operative_config.gin")
    before, after = (
        tf.train.load_checkpoint(str(folder / "checkpoints" / "step-20"))
        for folder in (EARLIER, tmp_path / "again")
    )
    assert before.get_variable_to_shape_map() == after.get_variable_to_shape_map()
    for name in before.get_variable_to_shape_map():
        if "GRAPH" not in name:
            np.testing.assert_allclose(
                after.get_tensor(name), before.get_tensor(name), rtol=1e-5, atol=1e-6, err_msg=name
            )


def test_evaluates_and_exports_what_was_saved(model_dir, capsys):
    lines = metrics(model_dir, "eval")
    run(model_dir, *COMMAND, mode="eval")
    assert metrics(model_dir, "eval") == lines
    images, _ = ddl.data.load_digits("test")
    earlier = keras.models.load_model(EARLIER / "export" / "model.keras")(images)
    saved_model = tf.saved_model.load(str(EARLIER / "export" / "saved_model"))
    served = saved_model.serve(images)
    run(model_dir, *COMMAND, mode="export")
    now = keras.models.load_model(model_dir / "export" / "model.keras")(images)
    np.testing.assert_allclose(now, earlier, rtol=1e-6)
    np.testing.assert_allclose(served, earlier, rtol=1e-5, atol=1e-6)
