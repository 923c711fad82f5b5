"""Callbacks in runs from configs: names, pictures, errors, resuming with others."""

from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from ddl.callbacks.pictures import confusion

from ddl import config
from ddl.data import digits
from ddl.distribution.communication import Communication
from ddl.errors import ConfigError, DataError
from ddl.run import train
from tests.callbacks.runs import events, lines
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

PICTURES = """
RunPlan.callbacks = [@Every(), @SampleImages(), @inverted/SampleImages(), @ConfusionMatrix()]
Every.steps = 3
Every.function = @watched
SampleImages.steps = 4
SampleImages.number = 5
SampleImages.high = 16.0
inverted/SampleImages.method = 'inverted'
inverted/SampleImages.name = 'inverted'
"""


def run(tmp_path, text, *params, strategy=("one_device", 1), **arguments):
    (tmp_path / "run.gin").write_text(CONFIG + text)
    config.load([str(tmp_path / "run.gin")], list(params))
    placement = train.Placement(make_strategy(*strategy), Communication())
    train.run(placement, str(tmp_path / "run"), **arguments)


def summaries(tmp_path, tag):
    """Returns the tensors of a tag in the event files, by split and step."""
    found = {}
    for split in ("train", "eval"):
        for path in (tmp_path / split).glob("events.out.tfevents.*"):
            for record in tf.data.TFRecordDataset(str(path)).as_numpy_iterator():
                event = tf.compat.v1.Event.FromString(record)
                for value in event.summary.value:
                    if value.tag == tag:
                        found[split, event.step] = tf.make_ndarray(value.tensor)
    return found


def test_pictures_and_figures(tmp_path, capsys):
    run(tmp_path, PICTURES, strategy=("mirrored", 2))
    logged = [line["step"] for line in lines(tmp_path / "run") if "weights" in line]
    assert logged == [3, 6]
    assert "step 6 · epoch 0.26 · train · weights 0." in capsys.readouterr().out
    images = digits("test")[0][:5]
    for name, expected in (("samples", images), ("inverted", 16 - images.astype(int))):
        found = summaries(tmp_path / "run", name)
        assert found.keys() == {("train", 4), ("train", 8)}
        width, height, *encoded = found["train", 4]
        assert (width, height, len(encoded)) == (b"8", b"8", 5)
        for one, image in zip(encoded, expected, strict=True):
            decoded = tf.io.decode_png(one).numpy()
            np.testing.assert_allclose(decoded, image / 16 * 255, atol=1)
    check_confusion(tmp_path / "run")
    # It may resume with other callbacks, which is said.
    text = PICTURES.replace("Every.steps = 3", "Every.steps = 5")
    run(tmp_path, text, "TRAIN_STEPS = 12")
    assert "Every.steps: 3 → 5" in capsys.readouterr().out
    assert [x["step"] for x in lines(tmp_path / "run") if "weights" in x] == [3, 6, 10]


def check_confusion(model_dir):
    tables = summaries(model_dir, "confusion")
    assert {key for key, value in tables.items() if value.size == 1} == {("eval", 4), ("eval", 8)}
    assert ("confusion", "images") in {event[1:] for event in events(model_dir, "eval")}
    table = tables["eval", 8].item().decode().splitlines()
    counts = np.array([[int(x) for x in row.split("|")[2:-1]] for row in table[2:]])
    labels = digits("test")[1]
    np.testing.assert_array_equal(counts.sum(1), np.bincount(labels))
    accuracy = [line["accuracy"] for line in lines(model_dir) if line["split"] == "eval"][-1]
    assert np.trace(counts) / counts.sum() == pytest.approx(accuracy)


def test_confusion():
    counts = confusion(np.array([0, 1, 1, 2]), np.array([0, 1, 2, 2]), 3)
    np.testing.assert_array_equal(counts, [[1, 0, 0], [0, 1, 1], [0, 0, 1]])
    with pytest.raises(DataError, match="from 0 to 1, .* got labels from 0 to 2"):
        confusion(np.array([0, 2]), np.array([0, 1]), 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("RunPlan.callbacks = [@SampleImages()]\nSampleImages.steps = 2\n", "SampleImages.number"),
        ("RunPlan.callbacks = [@Every()]\nEvery.steps = 0\nEvery.function = @watched\n", "got 0"),
        ("RunPlan.callbacks = [@Every()]\nEvery.steps = 2\nEvery.function = @mlp\n", "mlp"),
        ("RunPlan.callbacks = [@watched]\n", "RunPlan.callbacks"),
        ("RunPlan.callbacks = [@EarlyStopping()]\nEarlyStopping.metric = 'F1'\n", "mode"),
        (
            "RunPlan.callbacks = [@EarlyStopping()]\nEarlyStopping.metric = 'F1'\n"
            "EarlyStopping.mode = 'max'\n",
            r"EarlyStopping.metric must be a metric of the evaluation \(loss, accuracy\), got 'F1'",
        ),
        (
            "RunPlan.callbacks = [@SampleImages()]\nSampleImages.steps = 2\n"
            "SampleImages.method = 'decoded'\n",
            "Inverted has no such method",
        ),
        ("RunPlan.callbacks = [@ConfusionMatrix()]\nConfusionMatrix.label = 'sort'\n", "'sort' is"),
    ],
)
def test_bad_configs(tmp_path, text, message):
    """Before anything is traced or written."""
    if message == "SampleImages.number":
        text += "SampleImages.number = 0\n"
    with pytest.raises(ConfigError, match=message):
        run(tmp_path, text)
    assert not (tmp_path / "run").exists()


def test_without_effect(tmp_path, capsys):
    text = "RunPlan.callbacks = [@Every(), @ConfusionMatrix()]\nEvery.steps = 9\n"
    run(tmp_path, f"{text}Every.function = @watched\n", mode="train", dry_run=True)
    output = capsys.readouterr().out
    assert "Every (watched) has steps = 9, but the run ends at step 8, so it is never" in output
    assert "ConfusionMatrix (ConfusionMatrix) is never called" in output
