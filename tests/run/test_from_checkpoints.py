"""Trainers of run folders, and what is made of their checkpoints."""

from pathlib import Path
from unittest.mock import Mock

import keras
import numpy as np
import pytest

import ddl
from ddl.errors import ConfigError, DdlError, ModelDirectoryError, NotReady
from ddl.run.directory import RunDirectory
from ddl.run.from_checkpoints import follow
from ddl.run.plan import Files
from ddl.run.writers import RunConsole
from tests.run.small import fit, lines, make_trainer
from tests.run.test_train import DIGITS_MLP, run


def test_a_trainer_is_loaded_from_its_folder(tmp_path, monkeypatch):
    average = ["Trainer.weight_average = @ExponentialMovingAverage()"]
    run(tmp_path / "run", *average, **DIGITS_MLP)
    monkeypatch.setattr("os.access", lambda *_: False)  # as in a folder of somebody else's
    trainer = ddl.load(tmp_path / "run", 20)  # tests/contract/test_workers.py loads the latest
    assert trainer.step == 20
    (line,) = [line for line in lines(tmp_path / "run", ["eval"]) if line["step"] == 20]
    assert trainer.evaluate()["loss"] == pytest.approx(line["loss"], rel=1e-6)
    paths = ddl.export(trainer, tmp_path / "export")
    assert [path.name for path in paths] == ["model.keras", "saved_model"]
    exported = keras.saving.load_model(paths[0])
    images, _ = ddl.data.digits("test")
    outputs = exported.predict(images, verbose=0)
    np.testing.assert_allclose(outputs, trainer.predict({"image": images}), rtol=1e-5, atol=1e-5)


def test_a_run_without_a_config_cannot_be_loaded(tmp_path):
    with pytest.raises(ModelDirectoryError, match=r"operative_config.gin does not exist.*ddl.fit"):
        ddl.load(tmp_path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    fit(make_trainer(), folder, train_steps=4, checkpoint_every=2, eval_every=None)
    return folder


def test_a_checkpoint_is_evaluated_into_the_files_once(finished):
    """A line of a callback after an evaluation of the same step is no evaluation."""
    trainer = make_trainer()
    with (finished / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "epoch": 0.4, "split": "eval", "calls": 1.0}\n')
    figures = ddl.evaluate(trainer, finished, 2)
    assert trainer.step == 2
    ddl.evaluate(trainer, finished, 2)
    _, line = [line for line in lines(finished, ["eval"]) if line["step"] == 2]
    assert line["loss"] == pytest.approx(figures["loss"])


def test_checkpoints_that_are_not_there_are_named(finished):
    with pytest.raises(ModelDirectoryError, match=r"no checkpoint 3 .*one of the steps .*: 2, 4"):
        ddl.evaluate(make_trainer(), finished, 3)
    with pytest.raises(ConfigError, match="best_metric"):
        ddl.evaluate(make_trainer(), finished, "best")


def test_a_follower_waits_when_another_worker_fails_and_gives_up(finished):
    trainer = make_trainer()
    files = Files.of(RunDirectory(finished), trainer, None, print)
    files.checkpoints.restore_model = Mock(side_effect=DdlError("Worker 1 failed."))
    with pytest.raises(NotReady, match=r"within 0.1 s. Worker 1 failed"):
        follow(trainer, files, 0.1, 4, RunConsole(shows=False))


def test_named_models_are_exported_to_folders(tmp_path):
    trainer = make_trainer()
    trainer.task.exported_models = {"one": trainer.model}
    assert ddl.export(trainer, tmp_path)[0] == tmp_path / "one" / "model.keras"
    trainer.task.exported_models = [trainer.model]
    with pytest.raises(ConfigError, match="exported_models must be a dict"):
        ddl.export(trainer, tmp_path)


def test_a_tilde_is_the_home_folder():
    assert RunDirectory("~/runs", writes=False).path == Path.home() / "runs"
