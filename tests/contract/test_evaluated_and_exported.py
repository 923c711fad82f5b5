"""Weights of a run that are evaluated, exported or predicted with, later and without ddl."""

import json
import shutil
import sys

import keras
import numpy as np
import pytest

import ddl
from tests.contract.commands import FOUR_DEVICES, assert_error, done, finished, lines, saved, small
from tests.processes import forked

AVERAGED = (
    "Trainer.weight_average = @ExponentialMovingAverage()",
    "ExponentialMovingAverage.decay = 0.5",
)
# The rate rises after the first evaluation, so that the first checkpoint is the best one.
NOT_AVERAGED = (
    "CHECKPOINT_EVERY = 6",
    "Retention.best_metric = 'loss'",
    "LearningRate.schedule = @PiecewiseConstantDecay()",
    "PiecewiseConstantDecay.boundaries = [6]",
    "PiecewiseConstantDecay.values = [%LEARNING_RATE, 5.0]",
    "Predictions.features = ['label']",
)
PLAN = (*NOT_AVERAGED, *AVERAGED)
WITHOUT_DDL = """
import sys
sys.modules["ddl"] = None
import keras, numpy as np, tensorflow as tf
folder, images = sys.argv[1], np.load(sys.argv[2])
model = keras.saving.load_model(folder + "/model.keras")
served = tf.saved_model.load(folder + "/saved_model")
np.savez(sys.argv[3], keras=model(images), saved_model=served.serve(images))
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return finished(tmp_path_factory.mktemp("finished") / "run", *PLAN)


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory):
    """A copy of the run with an export of its end."""
    copy = shutil.copytree(run, tmp_path_factory.mktemp("exported") / "run")
    return finished(copy, *PLAN, flags=("--mode=export",))


@pytest.fixture(scope="module")
def predicted(run, tmp_path_factory):
    """The predictions for the test data."""
    path = tmp_path_factory.mktemp("predicted") / "rows.npz"
    done(run, *PLAN, flags=("--mode=predict", f"--predictions={path}"))
    return np.load(path)


@pytest.mark.parametrize(("checkpoint", "step"), [(None, 12), ("best", 6), ("6", 6)])
def test_eval_mode_repeats_the_evaluation_of_a_checkpoint(run, tmp_path, checkpoint, step):
    copy = shutil.copytree(run, tmp_path / "run")
    (copy / "metrics.jsonl").unlink()
    given = () if checkpoint is None else (f"--checkpoint={checkpoint}",)
    ended = done(copy, *PLAN, flags=("--mode=eval", *given))
    assert f"step {step}" in ended.out
    (expected,) = [line for line in lines(run, "eval") if line["step"] == step]
    assert lines(copy, "eval") == [expected]


def test_a_follower_ends_with_the_run(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")
    done(copy, *PLAN, flags=("--mode=eval", "--follow_timeout=60"))
    assert lines(copy) == lines(run)  # no step twice


@pytest.mark.parametrize("mode", ["eval", "export", "predict"])
def test_without_a_checkpoint_nothing_is_made(tmp_path, mode):
    given = ("--predictions=rows.npz",) if mode == "predict" else ()
    ended = small(tmp_path / "none", *PLAN, flags=(f"--mode={mode}", *given))
    assert_error(ended, "checkpoint", str(tmp_path / "none"))
    assert list(tmp_path.iterdir()) == []


def test_predictions_are_rows_in_order(run, predicted):
    _, labels = ddl.data.digits("test")
    np.testing.assert_array_equal(predicted["label"], labels)
    assert predicted["output"].shape == (360, 10)
    accuracy = (predicted["output"].argmax(-1) == labels).mean()
    assert accuracy == pytest.approx(lines(run, "eval")[-1]["accuracy"])


def test_predictions_on_four_devices_as_json(run, predicted, tmp_path):
    path = tmp_path / "rows.jsonl"
    done(run, *PLAN, flags=("--mode=predict", f"--predictions={path}", *FOUR_DEVICES))
    rows = [json.loads(line) for line in path.open()]
    assert [row["label"] for row in rows] == predicted["label"].tolist()
    given = np.array([row["output"] for row in rows])
    np.testing.assert_allclose(given, predicted["output"], rtol=1e-5, atol=1e-5)


@pytest.mark.processes
def test_an_export_predicts_the_same_without_ddl(exported, predicted, tmp_path):
    images, _ = ddl.data.digits("test")
    np.save(tmp_path / "images.npy", images.astype("float32"))
    (tmp_path / "load.py").write_text(WITHOUT_DDL)
    paths = (exported / "export", tmp_path / "images.npy", tmp_path / "outputs.npz")
    command = [sys.executable, str(tmp_path / "load.py"), *map(str, paths)]
    loaded = forked.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=600)
    assert loaded.returncode == 0, loaded.stderr
    outputs = np.load(tmp_path / "outputs.npz")
    for form in ("keras", "saved_model"):
        np.testing.assert_allclose(outputs[form], predicted["output"], rtol=1e-5, atol=1e-5)


def test_the_average_of_the_weights_is_what_is_exported(exported, tmp_path):
    """A run without the average has the weights alone."""
    trained = saved(finished(tmp_path / "run", *NOT_AVERAGED)).values()
    model = keras.saving.load_model(exported / "export" / "model.keras")
    kernel = model.trainable_weights[-2].numpy()
    assert any(np.array_equal(value, kernel) for value in saved(exported).values())
    assert not any(np.array_equal(value, kernel) for value in trained)
