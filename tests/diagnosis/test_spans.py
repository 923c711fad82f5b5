import json
import os

import pytest

from ddl.diagnosis.phases import during
from ddl.diagnosis.spans import FOLDER, written_in


def test_a_trace_of_nested_phases(tmp_path):
    with written_in(tmp_path / "run", "worker 1", pytest.fail):
        with during("the run", kind="between"), during("a loop", lambda: " from step 3"):
            pass
        (file,) = (tmp_path / "run" / FOLDER).iterdir()
        whole_lines = file.read_text()  # as a killed process leaves it: Perfetto needs no bracket
    assert [event["name"] for event in json.loads(whole_lines + "]")[1:]] == ["a loop", "the run"]
    name, loop, run = json.loads(file.read_text())
    assert name["args"] == {"name": "worker 1"}
    assert loop["args"] == {"details": "a loop from step 3", "kind": None}
    assert run["ts"] <= loop["ts"]
    assert loop["ts"] + loop["dur"] <= run["ts"] + run["dur"] + 1  # rounded
    assert {event["ph"] for event in (loop, run)} == {"X"}
    assert {event["pid"] for event in (name, loop, run)} == {os.getpid()}
    with during("later"):
        pass
    assert "later" not in file.read_text()


def test_a_folder_that_cannot_be_written_ends_nothing(tmp_path):
    (tmp_path / FOLDER).write_text("a file")
    reported = []
    with written_in(tmp_path, "worker 0", reported.append), during("the run"):
        pass
    assert len(reported) == 1
    assert reported[0].startswith("There are no spans: ")
    assert reported[0].endswith("Training continues.")
