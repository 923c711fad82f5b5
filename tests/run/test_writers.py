import fcntl
import json
import os
import threading
import tracemalloc

import pytest
import tensorflow as tf

from ddl.errors import ModelDirectoryError
from ddl.run import metric_lines
from ddl.run.writers import JsonLinesWriter, TensorBoardWriter, Writers


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


NOT_OURS = {
    "text": b"garbage",
    "no UTF-8": b'{"step": 1, "\xff\xfe": 1}',
    "nested": b'{"step": ' + 100_000 * b"[",
    "NUL": 4096 * b"\0" + b'{"step": 1}',
    "a list": b"[1, 2]",
    "a number": b"7",
    "a text": b'"step"',
    "no step": b'{"loss": 1.0}',
    "step as text": b'{"step": "1"}',
    "step null": b'{"step": null}',
    "step true": b'{"step": true}',
    "step NaN": b'{"step": NaN}',
    "step infinite": b'{"step": Infinity}',
    "step too long": b'{"step": 1' + 5000 * b"0" + b"}",
    "step huge": b'{"step": 1' + 400 * b"0" + b"}",
    "step negative": b'{"step": -1}',
    "step broken": b'{"step": 1.5}',
    "two lines in one": b'{"step": 1, "lo{"step": 2, "loss": 1.0}',
    "huge": 5_000_000 * b"x",
    "byte order mark": b'\xef\xbb\xbf{"step": 1}',
}


@pytest.mark.parametrize("name", NOT_OURS)
def test_a_foreign_line_is_an_error(tmp_path, name):
    path = tmp_path / "metrics.jsonl"
    content = b'{"step": 1}\n' + NOT_OURS[name] + b'\n{"step": 9}\n'
    path.write_bytes(content)
    writer = JsonLinesWriter(path)
    for look in (writer.check, lambda: writer.has(3, "eval", ()), lambda: writer.drop_after(5)):
        with pytest.raises(
            ModelDirectoryError, match=r"metrics.jsonl:2 must be a JSON object"
        ) as raised:
            look()
        assert len(str(raised.value)) < 500
    assert path.read_bytes() == content


@pytest.mark.parametrize("name", NOT_OURS)
def test_a_line_that_was_cut_off_is_removed_by_who_writes_next(tmp_path, name):
    path = tmp_path / "metrics.jsonl"
    reported = []
    for _ in range(2):  # the same process, and one that comes later
        writer = JsonLinesWriter(path, reported.append)
        for step in (10, 20):
            writer.write(step, 0.0, "train", {})
            with path.open("ab") as file:
                file.write(NOT_OURS[name])  # by another process, which was killed
            assert not writer.has(99, "train", ())
    JsonLinesWriter(path, reported.append).drop_after(15)
    assert [line["step"] for line in lines(path)] == [10, 10]
    assert len(reported) == 4
    assert all(
        f"removed the incomplete last line of {len(NOT_OURS[name]):,} bytes." in x for x in reported
    )


def test_a_last_line_that_lacks_its_end_alone_is_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    reported = []
    path.write_bytes(b'{"step": 1}\n{"step": 2}')
    JsonLinesWriter(path, reported.append).write(3, 0.0, "train", {})
    assert [line["step"] for line in lines(path)] == [1, 2, 3]
    path.write_bytes(b'{"step": 1}\n{"step": 2}')
    JsonLinesWriter(path, reported.append).drop_after(2)
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'
    assert reported == []


def test_lines_that_an_editor_saved(tmp_path):
    """With CRLF, a step as 2.0, characters that are not ASCII, and an empty line."""
    path = tmp_path / "metrics.jsonl"
    kept = '{"step": 1}\r\n{"step": 2.0, "split": "eval", "größe": "\u2028\x85"}\r\n'.encode()
    path.write_bytes(kept)
    writer = JsonLinesWriter(path)
    assert writer.has(2, "eval", ["größe"])
    writer.drop_after(2)
    assert path.read_bytes() == kept
    path.write_bytes(kept + b"\r\n\n")
    writer.drop_after(2)
    assert path.read_bytes() == kept


def test_a_file_larger_than_a_chunk(tmp_path, monkeypatch):
    """Of lines as ddl writes them, which are not parsed one by one, and of others."""
    monkeypatch.setattr(metric_lines, "_CHUNK", 1000)
    path = tmp_path / "metrics.jsonl"
    writer = JsonLinesWriter(path)
    values = {"loss": 1.5e-7, "accuracy": float("nan"), "a b": -2.0}
    for step in range(40):
        writer.write(step, step / 7, "train", values)
    with path.open("a") as file:
        file.write('{"step": 40.0, "größe": 1}\n\n' + 3000 * "x")  # the end was cut off
    whole = path.read_bytes()
    assert writer.has(7, "train", values)
    assert not writer.has(7, "eval", values)
    assert not writer.has(70, "train", ())
    writer = JsonLinesWriter(path, lambda text: None)
    writer.drop_after(40)
    assert path.read_bytes() == whole[: -3000 - 1]
    writer.drop_after(20)
    assert path.read_bytes() == b"".join(whole.splitlines(keepends=True)[:21])
    path.write_bytes(path.read_bytes() + b"{}\n")
    with pytest.raises(ModelDirectoryError, match=r"metrics.jsonl:22 must be"):
        writer.check()


def test_lines_of_ddl_are_not_parsed_one_by_one(tmp_path, monkeypatch):
    monkeypatch.setattr(metric_lines, "parsed", lambda line: pytest.fail("parsed a line"))
    writer = JsonLinesWriter(tmp_path / "metrics.jsonl")
    for step in range(3):
        writer.write(step, 1e-6, "eval", {"loss": -1e300, "rate": 0.0, "inf": float("inf")})
    writer.check()
    writer.drop_after(2)
    assert not writer.has(3, "eval", ())


def test_lines_that_cannot_be_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.mkdir()
    with pytest.raises(ModelDirectoryError, match="metrics.jsonl cannot be read: Is a directory"):
        JsonLinesWriter(path).check()


def test_no_line_of_an_evaluation_beside_a_run_is_lost(tmp_path):
    """While the run replaces the file, and lines are cut off in it."""
    path = tmp_path / "metrics.jsonl"

    def evaluate():
        writer = JsonLinesWriter(path, lambda text: None)
        for step in range(500):
            writer.write(step, 0.0, "eval", {})

    def train():
        writer = JsonLinesWriter(path, lambda text: None)
        while thread.is_alive():
            writer.write(1000, 0.0, "train", {})
            with path.open("r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                file.seek(0, os.SEEK_END)
                file.write(b'{"step": 4, "lo')
            writer.drop_after(999)

    thread = threading.Thread(target=evaluate)
    thread.start()
    train()
    thread.join()
    assert [line["step"] for line in lines(path)] == list(range(500))


def test_lines_that_cannot_be_written_wait(tmp_path):
    reported = []
    path = tmp_path / "absent" / "metrics.jsonl"
    writer = JsonLinesWriter(path, reported.append)
    for step in (1, 2, 3):
        writer.write(step, 0.0, "train", {})
    writer.drop_after(2)
    assert len(reported) == 1
    assert "metrics.jsonl cannot be written: No such file" in reported[0]
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


def test_the_memory_does_not_hold_all_events(tmp_path):
    (tmp_path / "train").mkdir()
    file = tmp_path / "train" / "events.out.tfevents.1.x"
    with tf.io.TFRecordWriter(str(file)) as written:
        for step in range(100):
            event = tf.compat.v1.Event(step=step, file_version="x" * 200_000)
            written.write(event.SerializeToString())
    tracemalloc.start()
    try:
        TensorBoardWriter(tmp_path).drop_after(90)
        assert tracemalloc.get_traced_memory()[1] < 5e6
    finally:
        tracemalloc.stop()
    steps = [event.step for event in tf.compat.v1.train.summary_iterator(str(file))]
    assert steps == list(range(91))


@pytest.mark.parametrize("damage", ["record", "no event", "no events at all"])
def test_damaged_tensorboard_events_are_set_aside(tmp_path, damage):
    reported = []
    writer = TensorBoardWriter(tmp_path, reported.append)
    writer.write(10, 0.0, "train", {"loss": 1.0})
    writer.close()
    (file,) = (tmp_path / "train").iterdir()
    if damage == "no event":
        records = list(tf.data.TFRecordDataset(str(file)).as_numpy_iterator())
        with tf.io.TFRecordWriter(str(file)) as rewritten:
            for record in [*records, b"\xff\xff\xff", *records]:
                rewritten.write(record)
    else:
        intact = file.read_bytes() if damage == "record" else b""
        file.write_bytes(intact + bytes(range(256)))
    before = file.read_bytes()
    writer = TensorBoardWriter(tmp_path, reported.append)
    writer.drop_after(20)
    (aside,) = [path for path in file.parent.iterdir() if path != file]
    assert aside.read_bytes() == before
    assert "tfevents" not in aside.name  # by which TensorBoard finds what it reads
    (text,) = reported
    assert str(aside) in text
    events = list(tf.compat.v1.train.summary_iterator(str(file)))
    assert [e.step for e in events if e.summary.value] == [10] * (damage != "no events at all")


def test_writers_write_to_each(tmp_path):
    both = Writers([JsonLinesWriter(tmp_path / name) for name in ("a", "b")])
    both.write(1, 0.0, "train", {"loss": 1.0})
    both.close()
    assert lines(tmp_path / "a") == lines(tmp_path / "b") != []


@pytest.mark.parametrize("exists", [True, False])
def test_a_planted_link_is_not_followed(tmp_path, exists):
    other = tmp_path / "other"
    if exists:
        other.write_text("theirs")
    (tmp_path / "metrics.jsonl").symlink_to(other)
    reported = []
    writer = JsonLinesWriter(tmp_path / "metrics.jsonl", reported.append)
    with pytest.raises(ModelDirectoryError, match="it is a symbolic link.*Remove it"):
        writer.check()
    writer.write(10, 0.5, "train", {"loss": 1.5})
    with pytest.raises(ModelDirectoryError, match="it is a symbolic link.*Remove it"):
        writer.sync()
    assert len(reported) == 1
    assert other.exists() == exists
    assert not exists or other.read_text() == "theirs"


def test_a_link_beside_the_event_files_is_not_followed(tmp_path):
    writer = TensorBoardWriter(tmp_path)
    for step in (1, 2):
        writer.write(step, 0.0, "train", {"loss": 1.0})
    (tmp_path / "other").write_text("theirs")
    (tmp_path / "train" / "partial").symlink_to(tmp_path / "other")
    writer.drop_after(1)
    assert (tmp_path / "other").read_text() == "theirs"
    assert [
        path.name for path in (tmp_path / "train").iterdir() if "tfevents" not in path.name
    ] == []
