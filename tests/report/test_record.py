"""Directories in every state: each is named and described, and none ends the command."""

import fcntl
import json
import os
import re
import shutil
import struct
import sys
from pathlib import Path

import pytest
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary

from ddl.report.overview import duration, facts_of, labels
from ddl.report.record import read
from ddl.report.starts import Start, starts
from ddl.report.time_table import time_rows

EARLIER = Path(__file__).parents[1] / "run" / "earlier_run"
LINE = '{"step": %d, "epoch": 1.0, "split": "eval", "loss": 1.0}\n'


def write(folder, **files):
    """Writes files into a new folder: `a__b` is the name `b` in the folder `a`."""
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_gin", ".gin").replace("_json", ".json")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text) if isinstance(text, str) else path.write_bytes(text)
    folder.mkdir(exist_ok=True)
    return folder


def test_a_run_of_an_earlier_version():
    record = read(EARLIER)
    assert record.state == "finished: step 20 of 20"
    assert record.warnings == []
    assert record.bindings["LEARNING_RATE"] == "0.05"
    assert record.last("accuracy", "eval") == 0.3111111111111111
    facts = dict(facts_of(record))
    assert re.fullmatch(r"20\d\d-\d\d-\d\d \d\d:\d\d", facts.pop("last written"))
    assert facts == {
        **{"epochs": "0.87", "checkpoint": "step 20", "time in updates": "0.8 s"},
        "replicas": "1",
    }


def test_the_time_of_a_life(tmp_path):
    life = {"first": 5.0, "written": 15.0, "starts": 2, "reached": 9, "repeated": 4}
    text = json.dumps({**life, "seconds": {"loop": 6.0, "down": 4.0}})
    record = read(write(tmp_path / "whole", **{"metrics.jsonl": LINE % 6, "goodput_json": text}))
    assert facts_of(record)["goodput"] == "60.0%"
    assert time_rows([record.life]) == [
        *(("all", ["10.0 s"]), ("goodput", ["60.0%"])),
        *(("updates", ["6.0 s (60.0%)"]), ("down", ["4.0 s (40.0%)"])),
        *(("starts", ["2"]), ("updates made again", ["4"])),
    ]
    damaged = read(write(tmp_path / "damaged", **{"metrics.jsonl": LINE % 6, "goodput_json": "{"}))
    assert "goodput.json cannot be read: it is not as ddl writes it." in damaged.warnings
    assert "goodput" not in facts_of(damaged)


ENDED = json.dumps({"ended_by": "<Mine>", "scheduled": True, "seconds": 7200.0, "replicas": 4})
ON_SIGNAL = json.dumps({"ended_by": None, "scheduled": False, "seconds": "x", "replicas": None})
STATES = {
    "empty": ({}, "empty", ["The directory is empty."]),
    "config alone": (
        {"config_gin": "TRAIN_STEPS = 9\nf.a = [1,"},
        "not begun",
        [
            "Only the bindings before a fault in config.gin are compared: config.gin:2: A bracket",
            "There is a config, but neither metric nor checkpoint.",
        ],
    ),
    "killed after its first save": (
        {
            "operative_config_gin": "TOTAL_STEPS = 9\n",
            "checkpoints__step-0.index": "",
            "checkpoints__step-0_json": "{}",
        },
        "unfinished: step 0 of 9",
        ["There are checkpoints, but no metrics"],
    ),
    "other files": (
        {"notes": "hm"},
        "no run",
        ["There is no config, metric or checkpoint that can be read."],
    ),
    "folder of runs": ({"one__metrics.jsonl": ""}, "no run", ["It contains runs: one. Pass"]),
    "half-written": (
        {
            "config_gin": "TRAIN_STEPS = %MANY\nMANY = 9\n",
            "checkpoints__step-5.index": "",
            "checkpoints__step-5_json": '{"metr',
            "metrics.jsonl": '{"step": 3, "spl',
        },
        "unfinished: step 5 of 9",
        [
            "step-5.json cannot be read: it is not valid JSON",
            "no operative_config.gin",
            "checkpoints, but no metrics",
            "The last line of metrics.jsonl is incomplete",
        ],
    ),
    "stopped": (
        {
            "operative_config_gin": "TOTAL_STEPS = 90\n",
            "checkpoints__step-7.index": "",
            "checkpoints__step-7_json": ON_SIGNAL,
            "metrics.jsonl": LINE % 6,
        },
        "stopped on a signal after saving: step 7 of 90",
        [],
    ),
    "ended early": (
        {
            "operative_config_gin": "TOTAL_STEPS = 90\n",
            "checkpoints__step-7.index": "",
            "checkpoints__step-7_json": ENDED,
            "checkpoints__damaged__step-6__x": "",
            "metrics.jsonl": LINE % 7,
            "output_errors.txt": "Disk full \x1b[31m" + "x" * 9000,
            "train__events.out.damaged.1": "",
        },
        "ended early by <Mine>: step 7 of 90",
        [
            "Damaged checkpoints lie in checkpoints/damaged: step-6.",
            "output_errors.txt: Disk full",
            "train/ has 1 damaged event file.",
        ],
    ),
    "of a sanity mode": (
        {"sanity_run.txt": "fast_run\n\n…", "operative_config_gin": "TOTAL_STEPS = 2\n"}
        | {"metrics.jsonl": LINE % 2},
        "no real run, by --fast_run: finished: step 2 of 2",
        [],
    ),
    "from Python": (
        {"metrics.jsonl": LINE % 7 + '{"step": 8, "rewinds": 2, "skipped_updates": 3}\n'},
        "ended, or waits to be resumed: step 8",
        ["There is no config.", "rewound to a checkpoint: 2 so far", "gradients: 3."],
    ),
    "not text": (
        {"operative_config_gin": b"\xff\xfe", "metrics.jsonl": b"\xff\n", "checkpoints": "a file"},
        "unreadable",
        [
            "operative_config.gin cannot be read: it is not UTF-8",
            "number 1.",
            "checkpoints/ cannot be read",
            "There is no config, metric",
        ],
    ),
}


@pytest.mark.parametrize("case", STATES)
def test_states(case, tmp_path):
    files, state, warnings = STATES[case]
    record = read(write(tmp_path / "run", **files))
    assert record.state == state
    for warning in warnings:
        assert any(warning in each for each in record.warnings), record.warnings
    assert len(record.warnings) == len(warnings)


def test_what_is_no_file_is_not_opened(tmp_path):
    run = write(tmp_path / "run", secret=LINE % 1)
    os.mkfifo(run / "metrics.jsonl")
    (run / "config.gin").mkdir()
    (run / "operative_config.gin").symlink_to(run / "secret")
    record = read(run)
    assert record.curves == {}
    assert record.config is None
    assert [each.split(" cannot")[0] for each in record.warnings[:3]] == [
        *("operative_config.gin", "config.gin", "metrics.jsonl")
    ]
    assert read(tmp_path / "gone").state == "unreadable"


def test_event_files_of_one_second(tmp_path):
    event = Event(step=5, summary=Summary()).SerializeToString()
    written = struct.pack("<Q4x", len(event)) + event + bytes(4)
    (tmp_path / "train").mkdir()
    for process in ("host.1", "host.2"):
        for number in range(4):
            name = f"events.out.tfevents.77.{process}.{number}.v2"
            content = b"" if number % 2 else written
            (tmp_path / "train" / name).write_bytes(content)
    known, unknown = Start(77.0, 5), Start(77.0, None)
    assert starts(tmp_path, 0) == [known] * 4 + [unknown] * 4
    assert starts(tmp_path, 4) == [known] * 4


def test_a_run_that_trains_is_not_disturbed(tmp_path):
    if not Path("/proc/locks").exists():
        pytest.skip("the locks of other processes are known on Linux alone")
    run = shutil.copytree(EARLIER, tmp_path / "run")
    descriptor = os.open(run, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        assert read(run).state == "training: step 20 of 20"
    finally:
        os.close(descriptor)
    assert read(run).state == "finished: step 20 of 20"


def test_labels_tell_runs_apart():
    paths = ["/a/x/run", "/a/y/run", "/b/y/run", "/a/other", "/"]
    assert labels([Path(path) for path in paths]) == ["x/run", "a/y/run", "b/y/run", "other", "/"]


def test_durations():
    assert [duration(s) for s in (3.21, 59.99, 3599, 7500)] == [
        "3.2 s",
        "60.0 s",
        "1 h 00 min",
        "2 h 05 min",
    ]


def test_tensorflow_is_not_imported():
    """Of a fresh process, since this one has imported it."""
    import subprocess

    program = (
        "import sys, ddl.report.writing, ddl.report.__main__; print('tensorflow' in sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert answer.stdout == "False\n", answer.stderr
