"""Whole runs in this process: their lengths, what a resumed config may change, the dry run."""

from pathlib import Path

import gin
import pytest

import ddl
from ddl import config
from ddl.errors import ConfigError, ModelDirectoryError
from ddl.run import train
from tests.conftest import make_strategy
from tests.run.small import lines

CONFIGS = Path(__file__).parents[2] / "configs"
DIGITS_MLP = {"gin_file": "digits_mlp.gin"}
SHORT = ("TRAIN_STEPS = 40", "EVAL_EVERY = 20", "CHECKPOINT_EVERY = 20", "LOG_EVERY = 10")
CALLED = []


@gin.register
def note_call(event):
    CALLED.append((event.step, event.checkpoint is not None, "loss" in event.figures))


def run(model_dir, *params, strategy=("one_device", 1), gin_file="digits_cnn.gin", **arguments):
    config.load([str(CONFIGS / gin_file)], [*SHORT, *params])
    placement = train.Placement(make_strategy(*strategy))
    train.run(placement, None if model_dir is None else str(model_dir), **arguments)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    model_dir = tmp_path_factory.mktemp("finished") / "run"
    lengths = ("TRAIN_STEPS = @epochs_to_steps()", "epochs_to_steps.epochs = 2")
    run(model_dir, *lengths, "EVAL_EVERY = @steps_per_epoch()", "LOG_EVERY = 23", **DIGITS_MLP)
    return model_dir


def test_lengths_that_the_run_knows_are_periods_too(finished):
    for split in ("train", "eval"):
        assert [line["step"] for line in lines(finished, [split])] == [23, 46]


def test_a_resumed_run_may_change_its_plan_and_no_update(finished):
    plan = ("TRAIN_STEPS = 50", "LOG_EVERY = 5", "Retention.last = 1")
    with pytest.raises(ModelDirectoryError, match="hidden_units: .*(7,)"):
        run(finished, *plan, "mlp.hidden_units = (7,)", **DIGITS_MLP)
    run(finished, *plan, **DIGITS_MLP)
    assert lines(finished, ["train"])[-1]["step"] == 50


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (
            ["GLOBAL_BATCH_SIZE = @steps_per_epoch()"],
            "global_batch_size is needed to .*steps_per_epoch",
        ),
        (["EarlyStopping.metric = 'f1'", "EarlyStopping.mode = 'max'", "STOPS"], "f1"),
    ],
    ids=str,
)
def test_what_a_run_cannot_use_is_refused_at_the_start(params, message, tmp_path):
    stops = "RunPlan.callbacks = [@EarlyStopping()]"
    params = [stops if one == "STOPS" else one for one in params]
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        run(tmp_path / "run", *params, **DIGITS_MLP)
    assert not (tmp_path / "run").exists()


def test_wrong_exported_models_are_refused_at_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr(ddl.Classification, "exported_models", [1], raising=False)
    with pytest.raises(ConfigError, match="exported_models must be a dict"):
        run(tmp_path / "run", **DIGITS_MLP)


def test_a_step_that_reads_several_batches_needs_its_length():
    wgan = {"gin_file": "../examples/wgan_gp.gin", "mode": "train"}
    with pytest.raises(ConfigError, match=r"must be 6, .*update.next.*, got 1. Add steps_per_ep"):
        run(None, "EVAL_EVERY = @steps_per_epoch()", **wgan)


def test_a_dry_run_evaluates_saves_exports_and_calls_each_callback(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    CALLED.clear()
    callbacks = [
        "RunPlan.callbacks = [@Every(), @AfterEvaluation(), @AfterSave()]",
        "Every.steps = 1000",
        *(f"{k}.function = @note_call" for k in ("Every", "AfterEvaluation", "AfterSave")),
    ]
    run(tmp_path / "run", "Trainer.optimizer = @Adam()", *callbacks, dry_run=True, **DIGITS_MLP)
    assert sorted(CALLED) == [(1, False, True), (1, False, True), (1, True, True)]
    out = capsys.readouterr().out
    told = ("One step on one batch: loss", "An evaluation of one batch: loss", "replicas: 1")
    for words in (*told, "found no error"):
        assert words in out
    assert "would fail" not in out
    assert "so these have no effect: " in out
    assert "Adam.beta_1" not in out  # on request: tests/contract/test_commands.py
    assert list(tmp_path.iterdir()) == []
