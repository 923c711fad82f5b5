import json

import pytest
import tensorflow as tf

from ddl.errors import ModelDirectoryError
from ddl.writers import JsonLinesWriter, TensorBoardWriter, Writers


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_json_lines(tmp_path):
    writer = JsonLinesWriter(tmp_path / "metrics.jsonl")
    writer.write(10, 0.5, "train", {"loss": 1.5, "learning_rate": 0.1})
    writer.write(10, 0.5, "eval", {"loss": float("nan")})
    assert lines(tmp_path / "metrics.jsonl") == [
        {"step": 10, "epoch": 0.5, "split": "train", "loss": 1.5, "learning_rate": 0.1},
        {"step": 10, "epoch": 0.5, "split": "eval", "loss": None},
    ]


def test_lines_after_the_restored_step_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = JsonLinesWriter(path)
    for step in (10, 20, 30):
        writer.write(step, 0.0, "train", {"loss": float(step)})
    with path.open("a") as file:
        file.write('{"step": 40, "lo')  # cut off in the middle of a line
    writer = JsonLinesWriter(path)
    writer.drop_after(20)
    writer.write(30, 0.0, "train", {"loss": 3.0})
    assert [(line["step"], line["loss"]) for line in lines(path)] == [(10, 10), (20, 20), (30, 3)]


def test_a_line_of_somebody_else_is_told(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\ngarbage\n')
    with pytest.raises(ModelDirectoryError, match=r"metrics.jsonl:2 is not a line"):
        JsonLinesWriter(path).drop_after(5)
    assert path.read_text() == '{"step": 1}\ngarbage\n'


def test_lines_that_cannot_be_written_wait(tmp_path):
    told = []
    path = tmp_path / "absent" / "metrics.jsonl"
    writer = JsonLinesWriter(path, told.append)
    for step in (1, 2, 3):
        writer.write(step, 0.0, "train", {})
    writer.drop_after(2)
    assert len(told) == 1
    assert "metrics.jsonl cannot be written: No such file" in told[0]
    with pytest.raises(ModelDirectoryError, match="cannot be written"):
        writer.sync()
    path.parent.mkdir()
    writer.write(3, 0.0, "train", {})
    writer.sync()
    assert [line["step"] for line in lines(path)] == [1, 2, 3]


def test_tensorboard_events_hold_the_figures(tmp_path):
    writer = TensorBoardWriter(tmp_path)
    writer.write(7, 0.25, "eval", {"loss": 0.5})
    writer.close()
    (file,) = (tmp_path / "eval").iterdir()
    found = {
        value.tag: (event.step, float(tf.make_ndarray(value.tensor)))
        for event in tf.compat.v1.train.summary_iterator(str(file))
        for value in event.summary.value
    }
    assert found == {"loss": (7, 0.5), "epoch": (7, 0.25)}


def test_tensorboard_events_after_the_restored_step_are_dropped(tmp_path):
    def steps():
        return [
            event.step
            for file in sorted((tmp_path / "train").iterdir())
            for event in tf.compat.v1.train.summary_iterator(str(file))
            if event.summary.value
        ]

    writer = TensorBoardWriter(tmp_path)
    for step in (10, 20, 30):
        writer.write(step, 0.0, "train", {})
    writer.close()
    (file,) = (tmp_path / "train").iterdir()
    content = file.read_bytes()
    file.write_bytes(content[:-5])  # cut off in the middle of a record
    writer = TensorBoardWriter(tmp_path)
    writer.drop_after(20)
    assert steps() == [10, 20]
    writer.write(30, 0.0, "train", {})
    writer.drop_after(25)
    assert steps() == [10, 20]
    before = file.read_bytes()
    writer.drop_after(25)
    assert file.read_bytes() == before


def test_writers_write_to_each(tmp_path):
    both = Writers([JsonLinesWriter(tmp_path / name) for name in ("a", "b")])
    both.write(1, 0.0, "train", {"loss": 1.0})
    both.close()
    assert lines(tmp_path / "a") == lines(tmp_path / "b") != []
