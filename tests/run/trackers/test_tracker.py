"""What a run sends to a tracker, and what it does if the tracker fails."""

import dataclasses
import threading

import pytest
from ddl.run.trackers.tracker import TrackerWriter, check_installed

from ddl.errors import ConfigError, TrainingInterrupted
from ddl.run.directory import RunDirectory
from ddl.run.plan import RunPlan
from ddl.run.trackers import tracker as trackers
from ddl.run.writers import Writers


@dataclasses.dataclass
class Recorded:
    """A tracker that keeps what it gets; it fails at a given call."""

    fails_at: str = ""
    name: str = "recorded"

    def __post_init__(self):
        self.begun, self.logged, self.statuses = [], [], []
        self.id = "id-1"
        self.go = threading.Event()
        self.go.set()

    def _call(self, name):
        self.go.wait()
        if name == self.fails_at:
            raise ConnectionError(f"no route at {name}")

    def begin(self, folder, settings, run_id):
        self._call("begin")
        self.begun.append((folder, settings, run_id))
        return self

    def log(self, step, figures):
        self._call("log")
        self.logged.append((step, figures))

    def end(self, status):
        self._call("end")
        self.statuses.append(status)


@pytest.fixture
def directory(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    directory.open()
    yield directory
    directory.release()


def write_all(writer):
    writers = Writers([writer])
    writers.drop_after(0)
    writers.write(10, 0.5, "train", {"loss": 1.5})
    writers.write(10, 0.5, "eval", {"loss": 2.5, "accuracy": 0.5})
    writers.close()


def test_gets_figures_by_split_and_the_macros_of_the_config(directory):
    directory.write_configs("", "import a\nSEED = 3\nNAME = 'x'\nB = @f()\nmlp.units = (1,)\n")
    reports, tracker = [], Recorded()
    write_all(TrackerWriter(tracker, directory, reports.append))
    assert tracker.logged == [
        (10, {"epoch": 0.5, "train/loss": 1.5}),
        (10, {"epoch": 0.5, "eval/loss": 2.5, "eval/accuracy": 0.5}),
    ]
    ((folder, settings, run_id),) = tracker.begun
    assert folder == directory.path / "trackers" / "recorded"
    assert settings == {"SEED": 3, "NAME": "x", "B": "@f()"}
    assert (run_id, tracker.statuses, reports) == (None, ["done"], [])


def test_a_resumed_run_continues_the_run_of_the_tracker(directory):
    first, second = Recorded(), Recorded()
    for tracker in (first, second):
        write_all(TrackerWriter(tracker, directory, pytest.fail))
    assert [run_id for _, _, run_id in (*first.begun, *second.begun)] == [None, "id-1"]


@pytest.mark.parametrize("call", ["begin", "log", "end"])
def test_a_failure_is_reported_once_and_ends_no_run(directory, call):
    reports, tracker = [], Recorded(call)
    write_all(TrackerWriter(tracker, directory, reports.append))
    (report,) = reports
    assert report.startswith("The tracker recorded failed and gets no more figures")
    assert f"ConnectionError: no route at {call}" in report
    assert len(tracker.logged) == (2 if call == "end" else 0)


def test_an_id_that_cannot_be_kept_is_a_failure_of_the_tracker(directory):
    (directory.path / "trackers").write_text("a file")
    reports = []
    write_all(TrackerWriter(Recorded(), directory, reports.append))
    assert len(reports) == 1


def test_a_slow_tracker_delays_no_write(directory, monkeypatch):
    monkeypatch.setattr(trackers, "_PATIENCE", 0.01)
    reports, tracker = [], Recorded("log")
    tracker.go.clear()
    write_all(TrackerWriter(tracker, directory, reports.append))  # returns
    (sender,) = [thread for thread in threading.enumerate() if thread.name == "tracker"]
    tracker.go.set()
    sender.join()
    (report,) = reports  # also when it fails later
    assert "has not taken all figures within 0.01 s" in report


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (TrainingInterrupted("stopped"), "stopped"),
        (KeyboardInterrupt(), "stopped"),
        (RuntimeError("x"), "failed"),
    ],
)
def test_tells_how_the_run_ended(directory, error, status):
    tracker = Recorded()
    writer = TrackerWriter(tracker, directory, pytest.fail)

    def run():
        writer.write(1, 0.0, "train", {})
        try:
            raise error
        finally:
            Writers([writer]).close()

    with pytest.raises(type(error)):
        run()
    assert tracker.statuses == [status]


def test_without_a_directory_no_id_is_kept():
    tracker = Recorded()
    write_all(TrackerWriter(tracker, None, pytest.fail))
    assert tracker.begun == [(None, {}, None)]


def test_a_run_from_python_has_no_macros(directory):
    assert directory.macros() == {}


def test_refusals():
    with pytest.raises(ConfigError, match=r"RunPlan.trackers must be a list of trackers, got 'x'"):
        RunPlan(train_steps=1, trackers="x")
    with pytest.raises(ConfigError, match="a list of trackers, got Recorded"):
        RunPlan(train_steps=1, trackers=Recorded())
    with pytest.raises(ConfigError, match="one tracker of each kind, got recorded, recorded"):
        RunPlan(train_steps=1, trackers=[Recorded(), Recorded()])
    with pytest.raises(ConfigError, match=r"run: pip install '\.\[absent\]'\. Or leave"):
        check_installed("no_module_of_this_name", "absent", "Absent")
