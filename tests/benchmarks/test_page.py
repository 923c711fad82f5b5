import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import benchmarks
import benchmarks.__main__ as runner
from benchmarks import page
from benchmarks.report import RESULTS, Bar, Images, Plot, Report, Series, Spread, Table


def write_result(folder, name="memory", value=1.25, quick=False):
    report = Report(
        [Table("Times", ["what", "ms"], [["a", Spread(1.0, 0.5, 1234.5)]])],
        [Bar("b / a", value, 1.5)],
        notes=["A note."],
    )
    result = {
        "name": name,
        "title": f"What {name} is",
        "text": "How.",
        "command": f"python -m benchmarks.{name}",
        "quick": quick,
        "date": "2020-01-01 00:00 UTC",
        "seconds": 90.0,
        "machine": {"cores": 2, "processor": "P", "memory": 8.0, "gpus": "none", "system": "S"},
        "versions": {"ddl": "0"},
        **report.as_json(),
    }
    (folder / f"{name}.json").write_text(json.dumps(result))


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        (0.0, "0"),
        (0.012345, "0.0123"),
        (1.0, "1.00"),
        (12345.678, "12,346"),
        (3e-9, "3e-09"),
        (12345, "12,345"),
        ("text", "text"),
        (Spread(1.5, 1.25, 10.0), "1.50 (1.25–10.0)"),
    ],
)
def test_cells_show_three_digits(cell, text):
    assert page.text_of(cell) == text


def test_the_page_is_made_of_what_is_there(tmp_path):
    write_result(tmp_path, "zzz", value=1.75)
    write_result(tmp_path, "memory", quick=True)
    (tmp_path / "zzz.png").touch()
    text = page.write_page(tmp_path).read_text()
    assert (tmp_path / "README.md").read_text() == text
    assert text.index("## What memory is") < text.index("## What zzz is")
    assert "| [memory](#what-memory-is) | b / a | ≥ 1.5 | 1.25 | missed |" in text
    assert "| [zzz](#what-zzz-is) | b / a | ≥ 1.5 | 1.75 | met |" in text
    assert "| a | 1.00 (0.500–1,234) |" in text
    assert text.count("A quick run") == 1
    assert "![What zzz is](zzz.png)" in text
    assert "memory.png" not in text


def test_pictures_of_bars_and_lines(tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "a.png"
    bars = Plot("bars", "case", "ratio", [Series("a", ["x", "y"], [1.0, Spread(2.0, 1.0, 3.0)])])
    lines = Plot("lines", "n", "s", [Series("a", [1, 2], [1.0, 2.0])], log_x=True, log_y=True)
    page.draw([bars, lines], picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    page.draw([], picture)
    assert not picture.exists()


def test_a_picture_of_images(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    page.draw([Images("", ["f" * 64, *["0" * 64] * 11])], tmp_path / "a.png")
    pixels = image.imread(tmp_path / "a.png")[..., 0]
    black = pixels < 0.1
    rows, columns = np.flatnonzero(black.any(axis=1)), np.flatnonzero(black.any(axis=0))
    height, width = np.ptp(rows) + 1, np.ptp(columns) + 1
    assert black[rows[0] : rows[-1], columns[0] : columns[-1]].all()
    assert height == pytest.approx(width, abs=2)
    assert width == pytest.approx(pixels.shape[1] * 8 / 90, rel=0.1)  # 10 images, each with a gap


def test_the_committed_page_is_that_of_the_committed_results():
    path = page.page_path(RESULTS)
    if not path.exists():
        pytest.skip("no results yet")
    assert path.read_text() == page.page(RESULTS, path)


def test_all_benchmarks_are_named():
    folder = Path(benchmarks.__file__).parent
    found = {p.stem for p in folder.glob("*.py") if "\n    command.main(measure" in p.read_text()}
    assert found == {*benchmarks.BENCHMARKS, *benchmarks.LONG, *benchmarks.ON_GPU}


def test_one_that_fails_loses_nothing(tmp_path, monkeypatch, capsys):
    write_result(tmp_path, "memory")
    ran = []

    def run(command):
        ran.append(command[2])
        return "status 3" if command[2] == "benchmarks.memory" else ""

    monkeypatch.setattr(runner, "run", run)
    monkeypatch.setattr(sys, "argv", ["benchmarks", f"--results={tmp_path}"])
    with pytest.raises(SystemExit, match="1"):
        runner.main()
    assert ran == [f"benchmarks.{name}" for name in benchmarks.BENCHMARKS]
    assert "memory: status 3" in capsys.readouterr().err
    assert "What memory is" in (tmp_path / "README.md").read_text()


def test_a_long_one_runs_by_its_name(tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(runner, "run", lambda command: ran.append(command[2]) or "")
    monkeypatch.setattr(sys, "argv", ["benchmarks", f"--results={tmp_path}", "large_batch"])
    runner.main()
    assert ran == ["benchmarks.large_batch"]


def test_a_process_is_told_apart_by_how_it_ends():
    assert runner.run([sys.executable, "-c", ""]) == ""
    assert runner.run([sys.executable, "-c", "raise SystemExit(3)"]) == "status 3"
    assert runner.run(["sleep", "60"], 0.2) == "stopped after 0.2 s"


def test_an_unknown_name_is_an_error():
    command = [sys.executable, "-m", "benchmarks", "nothing"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "no benchmark nothing" in ended.stderr
