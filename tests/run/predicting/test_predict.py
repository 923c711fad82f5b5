"""`--mode=predict`: whole runs in this process, and workers that are killed."""

import json
import os
import signal
from types import SimpleNamespace
from typing import Any

import gin
import keras
import numpy as np
import pytest
import tensorflow as tf
from ddl.run.predicting.identity import data_digest
from ddl.run.predicting.parts import PartialFile
from ddl.run.predicting.settings import Predictions

import ddl
from ddl.errors import ConfigError, DataError, ModelDirectoryError, TrainingInterrupted
from ddl.run.from_checkpoints import SavedWeights
from ddl.run.predicting import predict
from tests.run.test_train import DIGITS_MLP, run
from tests.run.whole_runs import ROOT

AVERAGE = (
    *("Trainer.weight_average = @ExponentialMovingAverage()", "EVAL_EVERY = None"),
    "ExponentialMovingAverage.decay = 0.9",
)
LABELS = "Predictions.features = ['label']"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    model_dir = tmp_path_factory.mktemp("finished") / "run"
    run(model_dir, *AVERAGE, **DIGITS_MLP)
    return model_dir


def predicted(model_dir, path, *params, **arguments):
    arguments = {**DIGITS_MLP, "mode": "predict", "predictions": str(path), **arguments}
    run(model_dir, *AVERAGE, *params, **arguments)
    return path


@pytest.fixture(scope="module")
def whole(finished, tmp_path_factory):
    """The file that one device writes without a stop."""
    return predicted(finished, tmp_path_factory.mktemp("whole") / "new" / "whole.npz", LABELS)


@gin.register
def arrays_of_file(path):
    with np.load(path) as arrays:
        return dict(arrays)


def test_rows_are_the_models_outputs_in_order(finished, whole, tmp_path, capsys):
    run(finished, *AVERAGE, **DIGITS_MLP, mode="export")
    model = keras.models.load_model(finished / "export" / "model.keras")
    images, labels = ddl.data.digits("test")
    rows = np.load(whole)
    assert list(rows) == ["label", "output"]
    np.testing.assert_array_equal(rows["label"], labels)
    np.testing.assert_allclose(rows["output"], model(images), rtol=1e-5, atol=1e-5)
    # On four replicas, another source with weights and texts.
    images = images[:77]
    np.savez(tmp_path / "data.npz", image=images, weight=np.arange(77) % 2 / 2)
    path = tmp_path / "own.jsonl"
    source = ("Predictions.data = @arrays_of_file", f"arrays_of_file.path = '{tmp_path}/data.npz'")
    averages = SavedWeights(20)
    predicted(finished, path, *source, strategy=("mirrored", 4), saved_weights=averages)
    output = capsys.readouterr().out
    assert "Restored step 20 from" in output
    assert f"Wrote 77 rows to {path}: weight float32, output float32 [10]." in output
    lines = [json.loads(line) for line in path.open()]
    run(finished, *AVERAGE, **DIGITS_MLP, mode="export", saved_weights=averages)
    model = keras.models.load_model(finished / "export" / "model.keras")
    given = np.array([line["output"] for line in lines])
    np.testing.assert_allclose(given, model(images), rtol=1e-5, atol=1e-5)
    assert [line["weight"] for line in lines] == [n % 2 / 2 for n in range(77)]


class Killed(BaseException):
    """Ends a command as SIGKILL does: nothing handles it."""


def test_stopped_it_goes_on_to_the_same_file(finished, whole, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(predict, "_PART_SECONDS", 0)
    path, made = tmp_path / "part.npz", []
    add = PartialFile.add

    def at_second(action):
        def then(self, first, part):
            add(self, first, part)
            made.append(first)
            if len(made) == 2:
                action()

        monkeypatch.setattr(PartialFile, "add", then)

    def kill():
        raise Killed

    at_second(kill)
    with pytest.raises(Killed):
        predicted(finished, path, LABELS)
    assert not path.exists()
    stopped = made.copy()
    made.clear()
    at_second(lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(TrainingInterrupted, match="stopped on SIGTERM after .* of 360 rows. Run"):
        predicted(finished, path, LABELS)
    message = "weights: .* → .*\nRepeat the stopped command, with its --checkpoint"
    with pytest.raises(ModelDirectoryError, match=message):
        predicted(finished, path, LABELS, saved_weights=SavedWeights(20))

    # Neither other columns nor other data of as many rows come into the same file.
    def classes(self, features):
        return tf.argmax(self.model(features["image"]), -1)

    with monkeypatch.context() as changed:
        changed.setattr(ddl.Classification, "predict", classes)
        message = "rows of the columns label int64, output float32 .* row .* output int64. Repeat"
        with pytest.raises(ModelDirectoryError, match=message):
            predicted(finished, path, LABELS)
    load = ddl.data.Source.__init__

    def changing(self, *args, **arguments):
        load(self, *args, **arguments)
        if len(self) == 360:
            self.arrays["image"] = self.arrays["image"].copy()
            self.arrays["image"][180] += 1

    with monkeypatch.context() as changed:
        changed.setattr(ddl.data.Source, "__init__", changing)
        with pytest.raises(ModelDirectoryError, match="data: 360 rows .* digest .* → 360 rows"):
            predicted(finished, path, LABELS)
    assert not path.exists()
    capsys.readouterr()
    predicted(finished, path, LABELS)
    assert "Resuming after " in capsys.readouterr().out
    assert path.read_bytes() == whole.read_bytes()
    assert len({*stopped, *made}) == len(stopped) + len(made)  # no row is computed twice
    assert [*tmp_path.iterdir()] == [path]


def test_outputs_of_own_tasks(finished, tmp_path, monkeypatch):
    def outputs(self, features):
        logits = self.model(features["image"], training=False)
        return {"class": tf.argmax(logits, -1), "pair": (logits[:, :2], tf.as_string(logits[:, 0]))}

    monkeypatch.setattr(ddl.Classification, "predict", outputs)
    rows = np.load(predicted(finished, tmp_path / "own.npz"))
    assert {name: (x.dtype.kind, x.shape) for name, x in rows.items()} == {
        "class": ("i", (360,)),
        "pair/0": ("f", (360, 2)),
        "pair/1": ("U", (360,)),
    }
    np.testing.assert_allclose(rows["pair/1"].astype(float), rows["pair/0"][:, 0], atol=1e-4)

    def of_open_width(self, features):
        return tf.boolean_mask(features["image"], features["image"][0, :, 0, 0] >= 0, axis=1)

    monkeypatch.setattr(ddl.Classification, "predict", of_open_width)
    message = r"must return tensors of static shape, got \(\d+, None, 8, 1\).* Pad it to a fixed"
    with pytest.raises(ConfigError, match=message):
        predicted(finished, tmp_path / "open.npz")


def test_the_digest_of_data_tells_changed_examples():
    values, texts = np.arange(40, dtype="f4"), np.array([b"a", b"bc"] * 20)

    def digests(values, texts):
        rows = {"x": values, "text": texts}
        items = ddl.data.Source([{"x": x, "text": t} for x, t in zip(values, texts, strict=True)])
        stream = ddl.data.stream(tf.data.Dataset.from_tensor_slices(rows))
        sources = ddl.data.Source(rows), items, stream
        return [data_digest(source, 16) for source in sources]

    same, last, middle = digests(values, texts), values.copy(), values.copy()
    last[39], middle[20] = 7, 7
    assert digests(values.copy(), texts) == same
    first = digests(values, np.array([b"ab", b"c"] * 20))
    for other, differ in (
        (first, [True, True, True]),
        (digests(last, texts), [True, True, False]),  # a stream is not read to its end
        (digests(middle, texts), [True, False, False]),
    ):
        assert [one != now for one, now in zip(same, other, strict=True)] == differ


def test_the_digest_of_data_takes_texts_of_both_kinds():
    def digest(*texts):
        return data_digest(ddl.data.Source(dict(x=list(texts))), 2)

    assert digest("é", b"b\0") == digest("é".encode(), "b\0")
    assert len({digest("ab", b"c\0"), digest("a", b"bc\0"), digest("ab", b"d\0")}) == 3


def test_what_is_refused_before_weights_are_restored(tmp_path, monkeypatch):
    monkeypatch.setattr(ddl.Classification, "predict", None)
    message = "Classification has no outputs to predict. Give it .* for --mode=predict."
    with pytest.raises(ConfigError, match=message):
        predicted(tmp_path / "no_run", tmp_path / "x.jsonl")
    assert not [*tmp_path.iterdir()]
    without: Any = SimpleNamespace(eval_pipeline=None)
    with pytest.raises(ConfigError, match="binds neither Predictions.data nor Trainer.eval_data"):
        Predictions().source(without)
    with pytest.raises(DataError, match="names 'id', which the data do not have, only image"):
        Predictions({"image": np.zeros([2, 3])}, ["id"]).source(without)
    with pytest.raises(ConfigError, match="must be a list of names, got 'label'"):
        Predictions(features="label")
    endless = tf.data.Dataset.from_tensors({"image": [1.0]}).repeat()
    with pytest.raises(DataError, match="needs data with an end, got endless data"):
        Predictions(endless).source(without)


PROGRAM = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from ddl.run.predicting import predict
from ddl.run.predicting.identity import data_digest
predict._PART_SECONDS = 0.05
from ddl.main import run
run()
"""
