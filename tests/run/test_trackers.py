"""Trackers in runs that are resumed: MLflow with files, W&B offline, and one that fails."""

import keras
import numpy as np
import pytest

import ddl
from ddl.errors import ConfigError
from ddl.run.trackers import MLflow, WeightsAndBiases

X = np.random.default_rng(0).normal(size=(16, 3)).astype("f4")


def run(model_dir, tracker, train_steps, progress=False):
    keras.utils.set_random_seed(0)
    task = ddl.Classification(keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)]))
    data = {"image": X, "label": (X.sum(1) > 0).astype("i4")}
    trainer = ddl.Trainer(task, "sgd", data, global_batch_size=8, eval_data=data)
    plan = {"train_steps": train_steps, "log_every": 2, "trackers": [tracker]}
    return ddl.fit(trainer, model_dir, **plan, progress=progress)


def test_mlflow(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = f"file://{tmp_path}/store"
    tracker = MLflow(tracking_uri=uri, experiment="digits")
    run(tmp_path / "run", tracker, 4)
    history = run(tmp_path / "run", tracker, 8)
    client = mlflow.MlflowClient(uri)
    experiment = client.get_experiment_by_name("digits").experiment_id
    (found,) = client.search_runs([experiment])  # the resumed run continued the first
    assert found.info.status == "FINISHED"
    points = client.get_metric_history(found.info.run_id, "train/loss")
    steps, losses = zip(*((point.step, point.value) for point in points), strict=True)
    assert steps == (2, 4, 6, 8)
    own = [row["loss"] for row in history if row["split"] == "train"]
    np.testing.assert_allclose(losses, own, rtol=1e-12)
    assert "eval/accuracy" in found.data.metrics


def test_weights_and_biases_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracker = WeightsAndBiases(project="digits")
    for steps in (4, 8):
        run(tmp_path / "run", tracker, steps)
    folder = tmp_path / "run" / "trackers" / "wandb"
    run_id = (folder / "run_id").read_text().strip()
    files = sorted(folder.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 2  # `wandb sync` joins files of one id
    assert {path.stem for path in files} == {f"run-{run_id}"}


class Failing:
    name = "failing"

    def begin(self, folder, settings, run_id):
        return "7"

    def log(self, step, figures):
        raise ConnectionError("no route")

    def end(self, status):
        raise AssertionError("it failed before")


def test_a_tracker_that_fails_is_reported_once_and_ends_no_run(tmp_path, capsys):
    history = run(tmp_path / "run", Failing(), 4, progress=True)
    assert history[-1]["step"] == 4
    assert capsys.readouterr().out.count("The tracker failing failed") == 1
    assert (tmp_path / "run" / "trackers" / "failing" / "run_id").read_text() == "7\n"


@pytest.mark.parametrize(("kind", "package"), [(MLflow, "mlflow"), (WeightsAndBiases, "wandb")])
def test_a_package_that_is_not_installed_is_named(kind, package, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"needs the package {package}.*'\.\[{package}\]'"):
        kind()
