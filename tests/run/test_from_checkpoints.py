"""Evaluating and exporting what a run has saved: whole runs in this process."""

import os
import shutil

import keras
import pytest
import tensorflow as tf

import ddl
from ddl.errors import ConfigError, ModelDirectoryError, NotReady
from ddl.run.from_checkpoints import SavedWeights
from tests.run.test_train import contents, metrics, run


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
        assert f"Restored step {step} from" in capsys.readouterr().out
    images, labels = ddl.data.digits("test")
    model = keras.models.load_model(model_dir / "export" / "model.keras")
    accuracy = (model(images).numpy().argmax(-1) == labels).mean()
    (line,) = [line for line in metrics(model_dir, "eval") if line["step"] == step]
    assert accuracy == pytest.approx(line["accuracy"], abs=1e-6)
    assert len(metrics(model_dir, "eval")) == 8


@pytest.mark.parametrize(
    ("what", "error", "message"),
    [
        (
            SavedWeights(7),
            ModelDirectoryError,
            "--checkpoint=7 does not exist in .* one of the steps 20, 40.",
        ),
        (SavedWeights("best"), ConfigError, "requires Retention.best_metric, got None. Set it"),
    ],
    ids=str,
)
def test_a_checkpoint_that_is_not_there(finished, what, error, message):
    before = contents(finished)
    with pytest.raises(error, match=message):
        run(finished, mode="eval", saved_weights=what)
    assert contents(finished) == before


class Clock:
    """Stands for `time`: each sleep lets the next event happen, or time pass."""

    def __init__(self, *events):
        self.events, self.now = list(events), 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        assert 0 < seconds <= 1
        if self.events:
            self.events.pop(0)()
        else:
            self.now += seconds


@pytest.fixture
def followed(finished, tmp_path, monkeypatch):
    """A folder to follow, and a function that brings a checkpoint of `finished` there."""
    folder = tmp_path / "run" / "checkpoints"

    def arrives(step, damaged=False):
        folder.mkdir(parents=True, exist_ok=True)
        for path in (finished / "checkpoints").glob(f"step-{step}.*"):
            copy = shutil.copy(path, folder)
            if damaged and ".data-" in path.name:
                os.truncate(copy, path.stat().st_size - 20)

    def follow(*events, params=("TRAIN_STEPS = 60",), timeout=5):
        monkeypatch.setattr("ddl.run.from_checkpoints.time", Clock(*events))
        run(folder.parent, *params, mode="eval", follow_timeout=timeout)
        return [line["step"] for line in metrics(folder.parent, "eval")]

    return follow, arrives, folder


def foreign_checkpoint(folder):
    """What TensorFlow's own manager writes, with its list."""
    checkpoint = tf.train.Checkpoint(weights=tf.Variable([1.0, 2.0]))
    manager = tf.train.CheckpointManager(checkpoint, str(folder), max_to_keep=3)
    return manager.save(checkpoint_number=5)


def test_following_a_run_evaluates_what_comes_until_the_last(followed, capsys):
    follow, arrives, folder = followed
    steps = follow(
        lambda: foreign_checkpoint(folder), lambda: arrives(20), lambda: arrives(40), params=()
    )
    assert steps == [20, 40]
    assert "Step 40 is the last step of the run." in capsys.readouterr().out


def test_following_a_run_that_ends_before_its_last_step(followed, capsys):
    follow, arrives, folder = followed
    arrives(20)
    arrives(40)
    before = contents(folder)
    assert follow() == [40]  # an earlier one is not evaluated
    assert "No checkpoint after step 40 appeared within 5 s." in capsys.readouterr().out
    assert contents(folder) == before


def test_following_through_a_damaged_checkpoint(followed, capsys):
    """A copy on its way looks like that, too: it is looked at again when its files change."""
    follow, arrives, _ = followed
    evaluated = []
    steps = follow(
        lambda: arrives(20, damaged=True),
        lambda: evaluated.append(capsys.readouterr().out),
        lambda: arrives(20),
        lambda: arrives(40, damaged=True),
        lambda: evaluated.append(capsys.readouterr().out),
        lambda: arrives(40),
    )
    assert steps == [20, 40]
    assert "Waiting for the next checkpoint." in evaluated[0]
    assert "the checkpoint before it is used" in evaluated[1]
    assert evaluated[1].count("accuracy") == 1


def test_following_a_run_that_goes_back(followed, capsys):
    """It removes a checkpoint and writes another of the same step, which is evaluated too."""
    follow, arrives, folder = followed
    arrives(20)

    def goes_back():
        for path in folder.glob("step-40.*"):
            path.unlink()

    follow(lambda: arrives(40), goes_back, lambda: None, lambda: arrives(40))
    lines = [line for line in capsys.readouterr().out.splitlines() if "accuracy" in line]
    assert [line.split(" ·")[0] for line in lines] == ["step 20", "step 40", "step 40"]


def test_following_where_nothing_comes(tmp_path):
    missing = r"No checkpoint .* appeared in .* within 1 s. The folder does"
    with pytest.raises(ModelDirectoryError, match=missing) as raised:
        run(tmp_path / "none", mode="eval", follow_timeout=1)
    assert raised.value.exit_status == 1  # perhaps a typo: nothing to start again
    assert not (tmp_path / "none").exists()
    (tmp_path / "begun").mkdir()
    with pytest.raises(NotReady, match=missing) as raised:
        run(tmp_path / "begun", mode="eval", follow_timeout=1)
    assert raised.value.exit_status == 70  # 1 would tell a cluster not to start it again


@pytest.mark.parametrize("mode", ["follow", "eval", "export"])
@pytest.mark.parametrize("name", ["lr[0.1]"])  # which TensorFlow takes for a pattern
def test_what_others_saved_is_never_taken(tmp_path, mode, name, monkeypatch):
    model_dir = tmp_path / name
    foreign_checkpoint(tmp_path / "there")
    shutil.copytree(tmp_path / "there", model_dir / "checkpoints")
    monkeypatch.setattr("ddl.run.from_checkpoints.time", Clock())
    before = contents(model_dir)
    arguments = {"mode": "eval", "follow_timeout": 3} if mode == "follow" else {"mode": mode}
    with pytest.raises(
        ModelDirectoryError, match=r"(?i)no checkpoint .* checkpoint, ckpt-5\..*step-N"
    ):
        run(model_dir, **arguments)
    assert contents(model_dir) == before


def test_a_checkpoint_of_others_that_is_named_like_ddls_is_not_evaluated(tmp_path, monkeypatch):
    model_dir = tmp_path / "run"
    tf.train.Checkpoint(weights=tf.Variable([1.0])).write(str(model_dir / "checkpoints" / "step-5"))
    monkeypatch.setattr("ddl.run.from_checkpoints.time", Clock())
    failure = r"(?s)No checkpoint .* appeared in .* within 3 s. .*can be read:\n.*step-5: "
    with pytest.raises(ModelDirectoryError, match=failure):
        run(model_dir, mode="eval", follow_timeout=3)
    assert not (model_dir / "metrics.jsonl").exists()


def test_a_checkpoint_that_goes_before_it_is_restored(finished, tmp_path, monkeypatch):
    """Such as one that the run removes: fresh weights are never taken for it."""
    model_dir = tmp_path / "run"
    shutil.copytree(finished, model_dir)
    found = ddl.Checkpoints.saved

    def found_and_gone(checkpoints):
        saved = found(checkpoints)
        shutil.rmtree(checkpoints.folder)
        return saved

    monkeypatch.setattr(ddl.Checkpoints, "saved", found_and_gone)
    with pytest.raises(ModelDirectoryError, match="There is no checkpoint in"):
        run(model_dir, mode="eval")


@pytest.mark.parametrize("at", ["save", "export"])
def test_an_export_that_fails_leaves_the_one_before(finished, tmp_path, monkeypatch, at):
    model_dir = tmp_path / "run"
    shutil.copytree(finished, model_dir)
    run(model_dir, mode="export")
    before = contents(model_dir / "export")

    def full(*arguments, **keywords):
        raise tf.errors.ResourceExhaustedError(None, None, "No space left on device")

    monkeypatch.setattr(keras.Model, at, full)
    with pytest.raises(ModelDirectoryError, match="The export to .* failed: .*No space left"):
        run(model_dir, mode="export")
    assert contents(model_dir / "export") == before
    assert not list(model_dir.glob("*.partial"))
