"""The commands ddl.inspect and ddl.convert, in this process."""

import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.convert import __main__ as convert
from ddl.data import stored
from ddl.inspect import __main__ as inspect

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
    """Runs a command on the config and further bindings; returns its status and its output."""

    def run(command, *flags, more=()):
        (tmp_path / "data.gin").write_text(CONFIG)
        params = [f"--gin_param={binding}" for binding in more]
        status = 0
        try:
            command.run(["command", f"--gin_file={tmp_path}/data.gin", *flags, *params])
        except SystemExit as ended:
            status = ended.code
        finally:
            for name in command.FLAGS:
                command.FLAGS[name].unparse()
        captured = capsys.readouterr()
        return status, captured.out + captured.err

    return run


def test_a_batch_is_shown(run):
    status, shown = run(inspect, "--timed_batches=2", "--rows=2")
    assert status == 0
    assert "train data: ArraySource, 20 examples, 3 batches of 8 per epoch" in shown
    assert "image    uint8  [8, 8, 1]  0 to 16, mean " in shown
    assert "label: " in shown
    assert " × " in shown
    assert "example 1" in shown
    assert "example 2" not in shown
    assert "2 batches: " in shown
    assert "examples/s" in shown


def test_the_batch_is_that_of_the_run(run, tmp_path):
    flags = ["--batch=2", "--rows=8", f"--output={tmp_path}/out", "--timed_batches=0"]
    shown = run(inspect, *flags, "--gin_param=SEED = 3")[1]
    assert "batch 2, 4 rows of padding" in shown
    images, labels = ddl.data.load_digits("train")
    source = ddl.data.ArraySource(image=images[:20], label=labels[:20])
    (batch,) = source.batches(8, 2, seed=3, shuffle=True).take(1)
    picture = tf.io.decode_png((tmp_path / "out" / "train-image-2.png").read_bytes()).numpy()
    assert picture.shape == (8, 71, 1)
    expected = np.round(batch["image"][1] / 16 * 255)  # the digits reach 16
    np.testing.assert_array_equal(picture[:, 9:17], expected)


def test_evaluation_data_and_text(run):
    more = ("Trainer.eval_data = @text_lines()", "text_lines.files = 'README.md'")
    status, shown = run(inspect, "--data=eval", "--timed_batches=0", more=more)
    assert status == 0
    assert "eval data: RandomAccessSource" in shown
    assert "text: '# ddl'" in shown


def test_names_are_no_control_sequences(run, tmp_path):
    more = ("Trainer.eval_data = @text_lines()", "text_lines.files = 'README.md'")
    hostile = (*more, "text_lines.name = 'a\\x1b[2J'")
    status, shown = run(inspect, "--data=eval", "--timed_batches=0", more=hostile)
    assert (status, r"a\x1b[2J" in shown, "\x1b" in shown) == (0, True, False)
    output = f"--output={tmp_path}/a\x1b[2J"
    status, shown = run(convert, "--data=eval", output, "--format=tfrecord", more=more)
    assert (status, r"a\x1b[2J" in shown, "\x1b" in shown) == (0, True, False)


@pytest.mark.parametrize("shards", [1, 2])
def test_a_source_is_converted_and_trains_the_same(run, tmp_path, shards):
    status, shown = run(
        convert, f"--output={tmp_path}/new", f"--shards={shards}", "--format=tfrecord"
    )
    assert status == 0, shown
    assert "Wrote 20 examples: " in shown
    assert f"@stored() and stored.folder = '{tmp_path}/new'" in shown
    more = ("Trainer.train_data = @stored()", f"stored.folder = '{tmp_path}/new'")
    before, after = (
        run(inspect, "--timed_batches=0", "--rows=8", more=text)[1] for text in ((), more)
    )
    assert before.replace("ArraySource", "StoredSource") == after
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
    status, shown = run(command, *flags, more=[more] if more else [])
    assert status == 1
    assert message in shown
    assert "Traceback" not in shown
