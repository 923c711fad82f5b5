"""The page of the results, and the command of all benchmarks."""

import sys
from pathlib import Path

import pytest

import benchmarks
import benchmarks.__main__ as runner
from benchmarks import page
from benchmarks.harness import RESULTS


def test_the_committed_page_is_that_of_the_committed_results():
    path = page.page_path(RESULTS)
    assert path.read_text() == page.page(RESULTS, path)


def test_the_committed_results_are_small_and_of_benchmarks_that_there_are():
    known = {*benchmarks.BENCHMARKS, *benchmarks.LONG, *benchmarks.ON_GPU}
    for file in RESULTS.iterdir():
        assert file.stem in known
        assert file.suffix == ".png" or file.stat().st_size <= 20_000, file
        assert file.suffix == ".json" or file.stem in page.PICTURES


def test_pictures_are_drawn_of_the_results(tmp_path):
    for name in ("loop_overhead", "gpu_counts"):
        (tmp_path / f"{name}.json").write_text((RESULTS / f"{name}.json").read_text())
    text = page.write(tmp_path).read_text()
    assert (tmp_path / "loop_overhead.png").read_bytes().startswith(b"\x89PNG")
    assert "(loop_overhead.png)" in text
    assert "| [loop_overhead](#cost-of-ddls-loop-compared-with-the-alternatives) | MLP 25" in text


def test_all_benchmarks_are_named():
    folder = Path(benchmarks.__file__).parent
    found = {p.stem for p in folder.glob("*.py") if "\n    harness.main(measure" in p.read_text()}
    assert found == {*benchmarks.BENCHMARKS, *benchmarks.LONG, *benchmarks.ON_GPU}


def test_one_that_fails_loses_nothing(tmp_path, monkeypatch):
    (tmp_path / "memory.json").write_text((RESULTS / "memory.json").read_text())
    ran = []

    def run(command):
        ran.append(command[2])
        return "status 3" if command[2] == "benchmarks.memory" else ""

    monkeypatch.setattr(runner, "run", run)
    monkeypatch.setattr(sys, "argv", ["benchmarks", f"--results={tmp_path}"])
    with pytest.raises(SystemExit, match="memory: status 3"):
        runner.main()
    assert ran == [f"benchmarks.{name}" for name in benchmarks.BENCHMARKS]
    assert "## Memory growth" in (tmp_path / "README.md").read_text()
