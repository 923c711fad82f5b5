"""Benchmarks as commands: what a stopped one keeps, and several processes."""

import json
import os
import subprocess
import sys

import pytest

from benchmarks import page
from benchmarks.report import Report, Spread
from tests.run.whole_runs import ROOT

ALONE, NONE = "alone", "none"


@pytest.mark.parametrize(
    ("processes", "fails", "rows", "is_whole"),
    [
        (1, NONE, [["first", 5.0], ["second", 5.0]], True),
        (1, ALONE, [["first", 5.0]], False),
        (3, NONE, [["first", Spread(1, 0, 2)], ["second", Spread(1, 0, 2)]], True),
        (3, "2", [["first", Spread(0.5, 0, 1)], ["second", Spread(0.5, 0, 1)]], False),
    ],
)
def test_what_was_measured_is_kept(tmp_path, processes, fails, rows, is_whole):
    ended = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.small_benchmark", f"--results={tmp_path}"],
        cwd=ROOT,
        env=os.environ | {"PROCESSES": str(processes), "FAILS": fails},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode == 0) == is_whole, ended.stderr
    result = json.loads((tmp_path / "small_benchmark.json").read_text())
    assert result["is_whole"] == is_whole
    assert Report.from_json(result).tables[0].rows == rows
    text = page.write_page(tmp_path).read_text()
    assert ("Stopped before its end" in text) != is_whole
    assert f"digest {result['code']}" in text
    assert "Stale" not in text


def test_a_result_of_other_code_than_the_newest_is_stale(tmp_path):
    common = {"text": "", "command": "c", "quick": False, "seconds": 1.0, "versions": {}}
    machine = {"cores": 2, "processor": "P", "memory": 8.0, "gpus": "none", "system": "S"}
    for name, date, code in (("a", "2020", "1"), ("b", "2021", "2"), ("c", "2019", "2")):
        result = {"name": name, "title": name, "date": date, "code": code, "machine": machine}
        (tmp_path / f"{name}.json").write_text(
            json.dumps({**common, **result, **Report([]).as_json()})
        )
    sections = page.write_page(tmp_path).read_text().split("\n## ")
    stale = [part[0] for part in sections[1:] if "Stale: measured with other code" in part]
    assert stale == ["a"]
