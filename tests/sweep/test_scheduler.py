"""The processes of a sweep, with small programs in place of ddl.main."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# A run of 30 steps that evaluates and saves every 10. After a step of `pauses` it waits for
# SIGTERM, unless it has resumed there.
PROGRAM = """
import json, os, pathlib, signal, sys, time
signal.alarm(60)
asked = []
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda *_: asked.append(1))
plan, folder = json.loads(sys.argv[1]), pathlib.Path(sys.argv[2])
saved = folder / "checkpoints"
saved.mkdir(parents=True, exist_ok=True)
with open(folder / "starts", "a") as file:
    file.write(os.environ["SLOT"] + "\\n")
starts = len((folder / "starts").read_text().splitlines())
(folder / "pid.partial").write_text(str(os.getpid()))
os.replace(folder / "pid.partial", folder / "pid")
slot = folder.parent / ("slot-" + os.environ["SLOT"])
try:
    os.close(os.open(slot, os.O_CREAT | os.O_EXCL))
except FileExistsError:
    print("two runs at one place")
    sys.exit(1)
status = (plan.get("statuses", []) + [None] * starts)[starts - 1]
if status is not None:
    print("the last words")
    os.remove(slot)
    if status < 0:
        os.kill(os.getpid(), -status)
    sys.exit(status)
(folder / "operative_config.gin").write_text("TOTAL_STEPS = 30\\n")
step = max([int(file.stem[5:]) for file in saved.glob("*.index")] + [0])
while step < 30:
    step += 10
    line = {"step": step, "split": "eval", "accuracy": plan.get("value", 0.5) * step}
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps(line) + "\\n")
    if plan.get("deaf"):
        time.sleep(60)
    while step in plan.get("pauses", []) and not asked:
        time.sleep(0.01)
    (saved / f"step-{step}.index").touch()
    if asked and step < 30:
        os.remove(slot)
        sys.exit(75)
os.remove(slot)
"""

HOST = """
import json, sys
from pathlib import Path
from ddl.launcher.pinning import Pinning
from ddl.output import protect_standard_streams
from ddl.sweep.halving import Halving
from ddl.sweep.scheduler import Metric, Scheduler
protect_standard_streams("sweep")
plans, rungs, keep, places = json.loads(sys.argv[1])
folder = Path("sweep")
commands = {
    name: [sys.executable, "-S", "-c", sys.argv[2], json.dumps(plan), str(folder / "runs" / name)]
    for name, plan in plans.items()
}
halving = Halving(tuple(rungs), keep, "max") if rungs else None
scheduler = Scheduler(
    folder, commands, {name: [name] for name in plans}, Metric("accuracy", "eval"), halving,
    [Pinning(environment={"SLOT": str(place)}) for place in range(places)], 1,
)
scheduler.run()
decisions = {name: one.action for name, one in scheduler.decisions().items()}
over = [name for name, one in scheduler.runs.items() if one.finished]
print(json.dumps([over, scheduler.errors, decisions, scheduler.asked_to_stop]))
"""


@pytest.fixture
def sweep(tmp_path):
    """Starts a sweep of such programs, each described by its plan."""
    started = []

    def start(plans, rungs=(), keep=0.5, places=2):
        for slot in tmp_path.glob("sweep/runs/slot-*"):
            slot.unlink()  # of a run that was killed
        process = subprocess.Popen(
            [
                *(sys.executable, "-c", HOST),
                *(json.dumps([plans, rungs, keep, places]), PROGRAM),
            ],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def finish(process):
    """Returns the finished runs, errors, decisions, whether it was stopped, and the messages."""
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return *json.loads(output), errors


def starts(folder, name):
    file = folder / "sweep" / "runs" / name / "starts"
    return len(file.read_text().splitlines()) if file.exists() else 0


def wait_for(condition):
    patience = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < patience
        time.sleep(0.01)


def has_logged(folder, name, lines=1):
    file = folder / "sweep" / "runs" / name / "metrics.jsonl"
    return file.exists() and file.read_text().count("\n") >= lines


def is_running(folder, name):
    number = int((folder / "sweep" / "runs" / name / "pid").read_text())
    try:
        state = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def test_all_runs_finish_one_at_each_place(sweep, tmp_path):
    names = list("abcdef")
    finished, errors, _, _, _ = finish(sweep({name: {} for name in names}))
    assert (finished, errors) == (names, {})
    assert [starts(tmp_path, name) for name in names] == [1] * 6
    used = {(tmp_path / "sweep" / "runs" / name / "starts").read_text().strip() for name in names}
    assert used == {"0", "1"}
    # Nothing is left to do.
    assert finish(sweep({name: {} for name in names}))[0] == names
    assert [starts(tmp_path, name) for name in names] == [1] * 6


def test_a_users_error_is_reported_and_not_restarted(sweep, tmp_path):
    plans = {"a": {"statuses": [1]}, "b": {}}
    finished, errors, _, _, told = finish(sweep(plans))
    assert (finished, errors) == (["b"], {"a": 1})
    assert starts(tmp_path, "a") == 1
    assert "a ended with status 1, an error in flags, config, data or your own code" in told
    assert "  the last words" in told
    # The next start of the sweep tries it again: the error may be corrected.
    finished, errors, _, _, _ = finish(sweep(plans))
    assert (finished, errors) == (["a", "b"], {})
    assert [starts(tmp_path, name) for name in plans] == [2, 1]


def test_other_failures_are_restarted(sweep, tmp_path):
    plans = {"a": {"statuses": [70]}, "b": {"statuses": [-9]}, "c": {"statuses": [70, 70]}}
    finished, errors, _, _, told = finish(sweep(plans))
    assert (finished, errors) == (["a", "b"], {"c": 70})
    assert [starts(tmp_path, name) for name in plans] == [2, 2, 2]
    assert "b was killed by SIGKILL. It is restarted." in told


def test_a_divergence_is_a_result_and_not_repeated(sweep, tmp_path):
    plans = {"a": {"statuses": [76, 76]}, "b": {}}
    for _ in range(2):
        finished, errors, _, _, _ = finish(sweep(plans))
        assert (finished, errors) == (["b"], {})
        assert [starts(tmp_path, name) for name in plans] == [1, 1]


def test_killed_in_the_middle_it_loses_no_run_and_repeats_none(sweep, tmp_path):
    plans = {"a": {}, "b": {"pauses": [20]}, "c": {"pauses": [10]}, "d": {}}
    first = sweep(plans)
    wait_for(lambda: has_logged(tmp_path, "b", lines=2) and has_logged(tmp_path, "c"))
    first.kill()
    first.wait()
    wait_for(lambda: not is_running(tmp_path, "b") and not is_running(tmp_path, "c"))
    finished, errors, _, _, told = finish(sweep({name: {} for name in plans}))
    assert (finished, errors) == (list(plans), {})
    assert [starts(tmp_path, name) for name in plans] == [1, 2, 2, 1]
    assert "b resumes from step 10 (" in told
    steps = [
        json.loads(line)["step"]
        for line in (tmp_path / "sweep/runs/b/metrics.jsonl").read_text().splitlines()
    ]
    assert steps == [10, 20, 20, 30]  # from the checkpoint of step 10


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_on_and_the_runs_save(sweep, tmp_path, number):
    plans = {"a": {"pauses": [10]}, "b": {"pauses": [10]}, "c": {}}
    process = sweep(plans)
    wait_for(lambda: has_logged(tmp_path, "a") and has_logged(tmp_path, "b"))
    process.send_signal(number)
    finished, errors, _, stopped, told = finish(process)
    assert "a has stopped at step 10." in told
    assert "b has stopped at step 10." in told
    assert (finished, errors, stopped) == ([], {}, True)
    assert [starts(tmp_path, name) for name in plans] == [1, 1, 0]
    assert finish(sweep({name: {} for name in plans}))[0] == list(plans)


def test_a_second_signal_kills(sweep, tmp_path):
    process = sweep({"a": {"deaf": True}})
    wait_for(lambda: has_logged(tmp_path, "a"))
    process.send_signal(signal.SIGTERM)
    assert process.stderr.readline().startswith("sweep: a starts")
    assert "A second signal kills them" in process.stderr.readline()
    assert is_running(tmp_path, "a")
    process.send_signal(signal.SIGTERM)
    finished, errors, _, stopped, _ = finish(process)
    assert (finished, errors, stopped) == ([], {}, True)
    assert not is_running(tmp_path, "a")


def test_hopeless_runs_stop_at_a_rung_and_go_on_when_asked(sweep, tmp_path):
    values = {"a": 0.1, "b": 0.4, "c": 0.3, "d": 0.2}
    plans = {name: {"value": value, "pauses": [10]} for name, value in values.items()}
    finished, errors, decisions, _, told = finish(sweep(plans, rungs=[10]))
    assert (finished, errors) == (["b", "c"], {})
    assert decisions == {"a": "stop", "b": "train", "c": "train", "d": "stop"}
    assert [starts(tmp_path, name) for name in plans] == [1, 2, 2, 1]
    assert "a has reached the rung at step 10: accuracy 1." in told
    assert not (tmp_path / "sweep/runs/a/checkpoints/step-20.index").exists()
    # The same command has nothing to do; a larger share lets one of them go on.
    finish(sweep(plans, rungs=[10]))
    assert [starts(tmp_path, name) for name in plans] == [1, 2, 2, 1]
    assert finish(sweep(plans, rungs=[10], keep=0.75))[0] == ["b", "c", "d"]
    assert finish(sweep(plans))[0] == list(plans)
    assert [starts(tmp_path, name) for name in plans] == [2, 2, 2, 2]


def test_a_run_that_fails_holds_no_rung_up(sweep, tmp_path):
    plans = {"a": {"statuses": [1]}, "b": {"pauses": [10]}, "c": {"value": 0.1, "pauses": [10]}}
    finished, errors, decisions, _, _ = finish(sweep(plans, rungs=[10], keep=0.3))
    assert (finished, errors) == (["b"], {"a": 1})
    assert decisions == {"a": "stop", "b": "train", "c": "stop"}
