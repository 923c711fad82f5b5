"""metrics.jsonl: whole lines whatever happened, and none twice."""

import json
import threading
import time

import pytest

from ddl.checkpoints.directory import write_atomically
from ddl.errors import ModelDirectoryError
from ddl.run.writers import JsonLinesWriter


@pytest.fixture
def path(tmp_path):
    writer = JsonLinesWriter(tmp_path / "metrics.jsonl")
    for step in (1, 2, 3):
        writer.write(step, 0.1 * step, "train", {"loss": float(step)})
    return tmp_path / "metrics.jsonl"


def steps(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_values_that_are_not_finite_are_null(path):
    JsonLinesWriter(path).write(4, 0.4, "eval", {"loss": float("nan")})
    assert json.loads(path.read_text().splitlines()[-1])["loss"] is None


def test_later_steps_and_a_cut_off_line_are_dropped(path):
    with path.open("a") as file:
        file.write('{"step": 4, "lo')
    reports = []
    JsonLinesWriter(path, reports.append).drop_after(2)
    assert steps(path) == [1, 2]
    assert "removed the incomplete last line, 15 bytes" in reports[0]


def test_a_whole_last_line_without_its_end_is_kept(path):
    path.write_text(path.read_text()[:-1])
    writer = JsonLinesWriter(path)
    writer.drop_after(9)
    writer.write(4, 0.4, "train", {})
    assert steps(path) == [1, 2, 3, 4]


def test_a_line_that_ddl_did_not_write_is_named(path):
    with path.open("a") as file:
        file.write("loss: 3\n")
    with pytest.raises(ModelDirectoryError, match=rf"{path}:4 must be a JSON object with a step"):
        list(JsonLinesWriter(path).rows())


def test_a_failed_write_is_reported_and_repeated(tmp_path):
    reports, path = [], tmp_path / "later" / "metrics.jsonl"
    writer = JsonLinesWriter(path, reports.append)
    writer.write(1, 0.1, "train", {})
    writer.write(2, 0.2, "train", {})
    assert len(reports) == 1
    assert "cannot be written" in reports[0]
    path.parent.mkdir()
    writer.sync()
    assert steps(path) == [1, 2]


def test_a_line_that_is_written_while_the_file_is_replaced_is_kept(path):
    evaluation, run = JsonLinesWriter(path), JsonLinesWriter(path)
    with run._locked():
        thread = threading.Thread(target=evaluation.write, args=(9, 0.9, "eval", {}))
        thread.start()
        time.sleep(0.2)
        write_atomically(path, path.read_text())  # as `drop_after` of a run that resumes
    thread.join()
    assert steps(path) == [1, 2, 3, 9]


def test_a_link_is_followed(path, tmp_path):
    (tmp_path / "link").symlink_to(path)
    writer = JsonLinesWriter(tmp_path / "link")
    writer.drop_after(2)
    writer.write(7, 0.7, "train", {})
    assert (tmp_path / "link").is_symlink()
    assert steps(path) == [1, 2, 7]
