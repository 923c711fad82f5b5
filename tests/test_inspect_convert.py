"""The commands ddl.inspect and ddl.convert, in this process."""

import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl import convert, inspect
from ddl.data import stored

CONFIG = """
include 'standard.gin'
GLOBAL_BATCH_SIZE = 8
Trainer.train_data = @train/images()
Trainer.eval_data = @test/images()
images.name = 'digits'
images.image_shape = (8, 8, 1)
images.num_classes = 10
images.num_examples = 20
train/images.split = 'train'
test/images.split = 'test'
"""


@pytest.fixture
def run(tmp_path, capsys):
    """Runs a command on the config and further lines; returns its status and its output."""

    def run(command, *flags, more=""):
        (tmp_path / "data.gin").write_text(CONFIG + more)
        try:
            with pytest.raises(SystemExit) if command is None else _status() as status:
                command.run(["command", f"--gin_file={tmp_path}/data.gin", *flags])
        finally:
            for name in command.FLAGS:
                command.FLAGS[name].unparse()
        captured = capsys.readouterr()
        return status.code, captured.out + captured.err

    return run


class _status:
    code = 0

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if kind is SystemExit:
            self.code = error.code
            return True
        return False


def test_a_batch_is_shown(run):
    status, shown = run(inspect, "--timed_batches=2", "--rows=2")
    assert status == 0
    assert "train data: ArraySource, 20 examples, 3 batches of 8 per epoch" in shown
    assert "image    uint8    [8, 8, 1]  0 to 16" in shown
    assert "label: " in shown and " × " in shown
    assert "example 1" in shown and "example 2" not in shown
    assert "2 batches: " in shown and "examples/s" in shown


def test_the_batch_is_that_of_the_run(run, tmp_path):
    status, shown = run(
        inspect, "--batch=2", "--rows=8", f"--output={tmp_path}/out", "--timed_batches=0",
        "--gin_param=SEED = 3",
    )  # fmt: skip
    assert "batch 2, 4 rows of padding" in shown
    source = ddl.data.ArraySource(
        {
            name: values[:20]
            for name, values in zip(("image", "label"), ddl.data.load_digits("train"), strict=True)
        }
    )
    (batch,) = source.batches(8, 2, seed=3, shuffle=True).take(1)
    picture = tf.io.decode_png((tmp_path / "out" / "train-image-2.png").read_bytes()).numpy()
    assert picture.shape == (8, 71, 1)
    np.testing.assert_array_equal(picture[:, 9:17], batch["image"][1])


def test_evaluation_data_and_text(run):
    more = """
Trainer.eval_data = @text_lines()
text_lines.files = 'README.md'
"""
    status, shown = run(inspect, "--data=eval", "--timed_batches=0", more=more)
    assert status == 0
    assert "eval data: RandomAccessSource" in shown
    assert "text: '# ddl'" in shown


@pytest.mark.parametrize("shards", [1, 2])
def test_a_source_is_converted_and_trains_the_same(run, tmp_path, shards):
    status, shown = run(
        convert, f"--output={tmp_path}/new", f"--shards={shards}", "--format=tfrecord"
    )
    assert status == 0, shown
    assert "Wrote 20 examples: " in shown
    assert f"@stored() and stored.folder = '{tmp_path}/new'" in shown
    more = f"\nTrainer.train_data = @stored()\nstored.folder = '{tmp_path}/new'\n"
    before, after = (
        run(inspect, "--timed_batches=0", "--rows=8", more=text)[1] for text in ("", more)
    )
    assert before.replace("ArraySource", "RecordSource") == after
    assert len(stored(tmp_path / "new")) == 20


@pytest.mark.parametrize(
    ("command", "flags", "more", "message"),
    [
        (inspect, ["--data=eval"], "Trainer.eval_data = None", "The config has no eval data. Bind"),
        (inspect, [], "GLOBAL_BATCH_SIZE = None", "Exactly one of GLOBAL_BATCH_SIZE"),
        (inspect, [], "images.num_exampels = 3", "num_exampels"),
        (inspect, ["--batch=-1"], "", "--batch"),
        (convert, [], "", "--output is required"),
        (convert, ["--output=docs"], "", "docs must be a new or empty folder"),
        (convert, ["--output=x", "--shards=99"], "", "must be from 1 to 20, got 99"),
    ],
)
def test_errors_have_status_1(run, command, flags, more, message):
    status, shown = run(command, *flags, more=more)
    assert status == 1
    assert message in shown
    assert "Traceback" not in shown
