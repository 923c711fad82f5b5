"""Evaluating and exporting what a run has saved: whole runs in this process."""

import shutil
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.errors import ConfigError, ModelDirectoryError
from ddl.saved_weights import SavedWeights
from tests.test_train import REGULARIZED, contents, metrics, run, tensors


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    model_dir = tmp_path_factory.mktemp("finished") / "run"
    run(model_dir)
    return model_dir


def test_the_best_checkpoint_stays_and_is_evaluated_and_exported(tmp_path, capsys):
    best = ["Retention.best_metric = 'loss'", "Retention.last = 1", "EVAL_EVERY = 5"]
    # The learning rate rises until training gets worse again.
    rates = ["LEARNING_RATE = 0.01", "ExponentialDecay.decay_rate = 1000.0"]
    rates += ["ExponentialDecay.decay_steps = 40", "CHECKPOINT_EVERY = 40"]
    model_dir = tmp_path / "run"
    run(model_dir, *best, *rates)
    losses = {line["step"]: line["loss"] for line in metrics(model_dir, "eval")}
    step = min(losses, key=losses.get)
    assert 0 < step < 40
    names = {path.name for path in (model_dir / "checkpoints").glob("*.index")}
    assert names == {f"step-{step}.index", "step-40.index"}
    for mode, what in [("eval", SavedWeights("best")), ("export", SavedWeights(step))]:
        capsys.readouterr()
        run(model_dir, *best, *rates, mode=mode, saved_weights=what)
        assert f"restored step {step} from" in capsys.readouterr().out
    images, labels = ddl.data.load_digits("test")
    model = keras.models.load_model(model_dir / "export" / "model.keras")
    accuracy = (model(images).numpy().argmax(-1) == labels).mean()
    (line,) = [line for line in metrics(model_dir, "eval") if line["step"] == step]
    assert accuracy == pytest.approx(line["accuracy"], abs=1e-6)
    assert len(metrics(model_dir, "eval")) == 8


@pytest.mark.parametrize(
    ("what", "error", "message"),
    [
        (SavedWeights(7), ModelDirectoryError, "--checkpoint=7: not in .*; there are: 20, 40"),
        (SavedWeights("best"), ConfigError, "Bind Retention.best_metric"),
    ],
    ids=str,
)
def test_a_checkpoint_that_is_not_there(finished, what, error, message):
    before = contents(finished)
    with pytest.raises(error, match=message):
        run(finished, mode="eval", saved_weights=what)
    assert contents(finished) == before


def test_own_weights_instead_of_averages(tmp_path):
    model_dir = tmp_path / "run"
    run(model_dir, **REGULARIZED, mode="train")
    run(model_dir, **REGULARIZED, mode="export", saved_weights=SavedWeights(averaged=False))
    own = keras.models.load_model(model_dir / "export" / "model.keras").weights
    run(model_dir, **REGULARIZED, mode="export")
    averaged = keras.models.load_model(model_dir / "export" / "model.keras").weights
    saved = [v for n, v in tensors(model_dir).items() if not n.startswith("averages/")]
    kernel = next(n for n, w in enumerate(own) if w.path.endswith("logits/kernel"))
    assert any(np.array_equal(own[kernel], value) for value in saved)
    assert not any(np.array_equal(averaged[kernel], value) for value in saved)


def test_following_a_run_evaluates_what_comes_until_the_last(finished, tmp_path, capsys):
    model_dir = tmp_path / "run"
    shutil.copytree(finished, model_dir)
    (model_dir / "metrics.jsonl").unlink()
    for path in (model_dir / "checkpoints").glob("step-40.*"):
        path.rename(tmp_path / path.name)
    (model_dir / "checkpoints" / "checkpoint").write_text('model_checkpoint_path: "step-20"\n')

    def arrives():
        for path in tmp_path.glob("step-40.*"):
            shutil.copy(path, model_dir / "checkpoints")
        (model_dir / "checkpoints" / "checkpoint").write_text('model_checkpoint_path: "step-40"\n')

    timer = threading.Timer(6, arrives)
    timer.start()
    run(model_dir, mode="eval", follow_timeout=60)
    timer.join()
    assert [line["step"] for line in metrics(model_dir, "eval")] == [20, 40]
    assert "step 40 is the last one of the run" in capsys.readouterr().out
    before = contents(model_dir / "checkpoints")
    run(model_dir, "TRAIN_STEPS = 60", mode="eval", follow_timeout=1)
    assert "no other checkpoint after that of step 40 in 1 s" in capsys.readouterr().out
    assert contents(model_dir / "checkpoints") == before


def test_following_where_nothing_comes(tmp_path):
    with pytest.raises(ModelDirectoryError, match=r"no checkpoint came to .* in 1 s"):
        run(tmp_path / "none", mode="eval", follow_timeout=1)


@pytest.mark.parametrize("at", ["save", "export"])
def test_an_export_that_fails_leaves_the_one_before(finished, tmp_path, monkeypatch, at):
    model_dir = tmp_path / "run"
    shutil.copytree(finished, model_dir)
    run(model_dir, mode="export")
    before = contents(model_dir / "export")

    def full(*arguments, **keywords):
        raise tf.errors.ResourceExhaustedError(None, None, "No space left on device")

    monkeypatch.setattr(keras.Model, at, full)
    with pytest.raises(ModelDirectoryError, match="export to .* failed: .*No space left"):
        run(model_dir, mode="export")
    assert contents(model_dir / "export") == before
    assert not list(model_dir.glob("*.partial"))
