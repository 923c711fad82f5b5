"""The seconds of a whole life: they add up, and repeated updates are known."""

import json
import os

import pytest

from ddl.run.timing.goodput import Goodput, line, read


class Process:
    """A process of a run, whose clock and seconds the test moves."""

    now = 1000.0

    def __init__(self, path, report=pytest.fail, start_up=2.0):
        self.seconds = {}
        began, Process.now = Process.now, Process.now + start_up
        self.goodput = Goodput(path, began, lambda: dict(self.seconds), report, lambda: self.now)

    def spends(self, kind, seconds):
        self.seconds[kind] = self.seconds.get(kind, 0.0) + seconds
        Process.now += seconds

    def trains(self, seconds, step, waits=0.0):
        self.spends("loop", seconds - waits)
        self.spends("input", waits)
        self.goodput.loop_ended(step)


@pytest.fixture(autouse=True)
def _from_the_same_time():
    Process.now = 1000.0


def test_a_life_with_a_kill_and_a_rewind(tmp_path):
    path = tmp_path / "goodput.json"
    first = Process(path)
    first.goodput.begin(0)
    first.spends("tracing", 4)
    first.trains(10, 100, waits=1)
    first.spends("saving", 3)
    first.trains(10, 200)
    first.trains(1, 210)  # killed before it is written
    Process.now += 20

    second = Process(path)
    second.spends("restoring", 1)
    second.goodput.begin(100)
    second.trains(12, 220, waits=6)  # up to 200 again
    second.goodput.begin(160)  # a rewind
    second.trains(6, 240)  # up to 220 again
    second.spends("evaluation", 2)
    second.goodput.write()

    life = read(path)
    assert life.seconds == {
        **{"loop": 9 + 10 + 1 + 1.5, "input": 1 + 1, "repeated": 10 + 4.5},
        **{"tracing": 4, "saving": 3, "restoring": 1, "evaluation": 2, "start_up": 4, "down": 21},
    }
    assert sum(life.seconds.values()) == life.written - life.first == Process.now - 1000
    assert (life.starts, life.reached, life.repeated) == (2, 240, 160)
    assert life.goodput == pytest.approx(21.5 / 73)
    assert line(life) == (
        "Goodput 29.5%: 21.5 s of updates in 73.0 s in 2 starts; down 21.0 s, repeated updates "
        "14.5 s, tracing 4.0 s, start-up 4.0 s, saving 3.0 s, waiting for input 2.0 s, evaluation "
        "2.0 s, restoring 1.0 s."
    )


def test_it_is_written_at_most_every_five_seconds(tmp_path):
    path = tmp_path / "goodput.json"
    process = Process(path)
    process.goodput.begin(0)
    assert not path.exists()
    written = []
    for step in range(1, 13):
        process.trains(1, step)
        written.append(read(path).reached)
    assert written == [1] * 5 + [6] * 5 + [11] * 2


@pytest.mark.parametrize(
    "content", ["", "{", "[1]", '{"first": 1}', "\xff", "link", "huge", "negative", "text"]
)
def test_a_file_that_is_not_one_is_reported_and_replaced(tmp_path, content):
    path = tmp_path / "goodput.json"
    life = {"first": 1, "written": 2, "starts": 1, "reached": 1, "repeated": 0}
    if content == "link":
        path.symlink_to(tmp_path / "planted")
    elif content == "huge":
        path.write_text(json.dumps({**life, "seconds": {}}) + " " * 2**17)
    elif content in ("negative", "text"):
        value = -1 if content == "negative" else "1"
        path.write_text(json.dumps({**life, "seconds": {"loop": value}}))
    else:
        path.write_bytes(content.encode("latin-1"))
    reported = []
    process = Process(path, reported.append)
    assert len(reported) == 1
    assert "cannot be read" in reported[0]
    assert "The goodput counts from this start on." in reported[0]
    process.goodput.begin(0)
    process.trains(1, 5)
    assert read(path).reached == 5
    assert not path.is_symlink()
    assert not (tmp_path / "planted").exists()


def test_a_failed_write_is_reported_once_and_tried_again(tmp_path):
    folder = tmp_path / "run"
    reported = []
    process = Process(folder / "goodput.json", reported.append)
    process.goodput.begin(0)
    process.trains(10, 1)
    process.trains(10, 2)
    assert len(reported) == 1
    assert "cannot be written" in reported[0]
    os.mkdir(folder)
    process.trains(10, 3)
    assert read(folder / "goodput.json").seconds["loop"] == 30


def test_a_clock_that_was_set_back_takes_no_time_away(tmp_path):
    first = Process(tmp_path / "goodput.json")
    first.goodput.begin(0)
    first.trains(10, 1)
    Process.now -= 500
    second = Process(tmp_path / "goodput.json")
    assert second.goodput.life.seconds["down"] == 0
    assert sum(second.goodput.life.seconds.values()) == 14
