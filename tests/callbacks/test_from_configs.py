"""Callbacks in runs from configs: figures, errors, resuming with others."""

from pathlib import Path

import pytest

from ddl import config
from ddl.distribution.communication import Communication
from ddl.errors import ConfigError
from ddl.run import train
from tests.callbacks.runs import lines
from tests.conftest import make_strategy

ROOT = Path(__file__).parents[2]

CONFIG = """
import tests.callbacks.watching
include 'standard.gin'
SEED = 0
GLOBAL_BATCH_SIZE = 64
TRAIN_STEPS = 8
EVAL_EVERY = 4
CHECKPOINT_EVERY = 4
LOG_EVERY = 8
LEARNING_RATE = 0.05
Trainer.task = @Inverted()
Inverted.model = @mlp()
mlp.input_shape = (8, 8, 1)
mlp.num_classes = 10
mlp.hidden_units = (8,)
Trainer.optimizer = @SGD()
SGD.learning_rate = %LEARNING_RATE
Trainer.train_data = @train/images()
Trainer.eval_data = @test/images()
images.name = 'digits'
images.image_shape = (8, 8, 1)
images.num_classes = 10
train/images.split = 'train'
test/images.split = 'test'
"""

WATCHED = """
RunPlan.callbacks = [@Every()]
Every.steps = 3
Every.function = @watched
"""


def run(tmp_path, text, *params, strategy=("one_device", 1), **arguments):
    (tmp_path / "run.gin").write_text(CONFIG + text)
    config.load([str(tmp_path / "run.gin")], list(params))
    placement = train.Placement(make_strategy(*strategy), Communication())
    train.run(placement, str(tmp_path / "run"), **arguments)


def test_figures_of_a_callback(tmp_path, capsys):
    run(tmp_path, WATCHED, strategy=("mirrored", 2))
    logged = [line["step"] for line in lines(tmp_path / "run") if "weights" in line]
    assert logged == [3, 6]
    assert "step 6 · epoch 0.26 · train · weights 0." in capsys.readouterr().out
    # It may resume with other callbacks, which is said.
    text = WATCHED.replace("Every.steps = 3", "Every.steps = 5")
    run(tmp_path, text, "TRAIN_STEPS = 12")
    assert "Every.steps: 3 → 5" in capsys.readouterr().out
    assert [x["step"] for x in lines(tmp_path / "run") if "weights" in x] == [3, 6, 10]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("RunPlan.callbacks = [@Every()]\nEvery.steps = 0\nEvery.function = @watched\n", "got 0"),
        ("RunPlan.callbacks = [@Every()]\nEvery.steps = 2\nEvery.function = @mlp\n", "mlp"),
        ("RunPlan.callbacks = [@watched]\n", "RunPlan.callbacks"),
        ("RunPlan.callbacks = [@EarlyStopping()]\nEarlyStopping.metric = 'F1'\n", "mode"),
        (
            "RunPlan.callbacks = [@EarlyStopping()]\nEarlyStopping.metric = 'F1'\n"
            "EarlyStopping.mode = 'max'\n",
            r"EarlyStopping.metric must be a metric of the evaluation \(loss, accuracy\), got 'F1'",
        ),
    ],
)
def test_bad_configs(tmp_path, text, message):
    """Before anything is traced or written."""
    with pytest.raises(ConfigError, match=message):
        run(tmp_path, text)
    assert not (tmp_path / "run").exists()


def test_without_effect(tmp_path, capsys):
    text = "RunPlan.callbacks = [@Every(), @AfterEvaluation()]\nEvery.steps = 9\n"
    text += "AfterEvaluation.function = @watched\n"
    run(tmp_path, f"{text}Every.function = @watched\n", mode="train", dry_run=True)
    output = capsys.readouterr().out
    assert "Every (watched) has steps = 9, but the run ends at step 8, so it is never" in output
    assert "AfterEvaluation (watched) is never called" in output
