"""The command: what it prints, writes and refuses; the test itself is in run/test_range_test.py."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ddl.lr_finder import __main__ as lr_finder
from ddl.lr_finder import results
from ddl.run.range_test import RangeTestResult
from tests.processes import forked

ROOT = Path(__file__).parent.parent


def result(**changes):
    rates = 1e-4 * 10 ** (np.arange(41) / 10)
    losses = np.concatenate([np.linspace(2, 1, 31), np.linspace(1, 9, 10)])
    values = {
        "rates": rates,
        "losses": losses,
        "smoothed": losses,
        "diverged": True,
        "steepest": 0.02,
        "at_least_loss": 0.1,
    }
    return RangeTestResult(**values | changes)


def command(*flags):
    return forked.run(
        [sys.executable, "-m", "ddl.lr_finder", *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.slow
def test_the_command(tmp_path):
    done = command(
        "--gin_file=configs/digits_cnn.gin",
        "--gin_param=BASE_BATCH_SIZE = 16",
        "--gin.SCALING_RULE='linear'",
        f"--output={tmp_path / 'out'}",
        "--smallest=1e-4",
        "--steps=120",
        "--strategy=mirrored",
        "--num_virtual_devices=2",
    )
    assert done.returncode == 0, done.stderr
    assert "Suggestion: a peak learning rate of" in done.stdout
    assert "With the scaling rule (× 4), set LEARNING_RATE = " in done.stdout
    table = json.loads((tmp_path / "out" / "range_test.json").read_text())
    assert table["global_batch_size"] == 64
    assert 0.001 < table["steepest"] < 1
    assert len(table["rates"]) == len(table["losses"]) <= 120
    assert {path.name for path in (tmp_path / "out").iterdir()} <= {
        "range_test.json",
        "range_test.png",
    }


def test_help_and_slips_answer_without_tensorflow(capsys):
    with pytest.raises(SystemExit) as exit_:
        lr_finder.run(["lr_finder", "--help"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    for flag in ("smallest", "gin_file", "gin_param", "strategy", "output"):
        assert f"\n--{flag}: " in text
    assert "model_dir:" not in text
    code = "import sys, ddl.lr_finder.__main__; sys.exit('tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--gin_file is required. Pass a config"),
        (["--gin_file=x.gin", "--model_dir=y"], "model_dir"),
        (["--gin_file=x.gin", "--gpus=first"], "numbers such as 0,1, got 'first'"),
        (["--gin_file=x.gin", "stray"], "'stray' is not a flag"),
    ],
)
def test_bad_flags(flags, message):
    done = command(*flags)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_what_it_says():
    lines = results.suggestion(result(), 64, 1.0)
    assert lines[0] == (
        "The test made 41 updates of batch size 64. The learning rate grew from 0.0001 to 1, where "
        "training diverged."
    )
    assert lines[1].startswith("Suggestion: a peak learning rate of 0.02, where")
    scaled = results.suggestion(result(), 64, 8.0)[-1]
    assert scaled == "With the scaling rule (× 8), set LEARNING_RATE = 0.0025."
    nothing = results.suggestion(result(steepest=None, diverged=False), 64, 1.0)
    assert nothing[0].endswith("to 1; training did not diverge.")
    assert nothing[1].startswith("There is no suggestion, since the loss did not fall.")


def test_the_plot_in_text():
    lines = results.text_plot(result(), rows=5, columns=41).splitlines()
    assert len(lines) == 7
    assert lines[0].startswith("   2.500 |")
    assert lines[3].startswith("   1.375 |")
    assert lines[4].startswith("   1.000 |")
    assert all("*" in line for line in lines[:5])
    assert "1.0e-04" in lines[6]
    assert "1.0e+00" in lines[6]


def test_what_it_writes(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    table, picture = results.write(result(), 64, tmp_path / "out")
    assert json.loads(table.read_text())["steepest"] == 0.02
    assert picture.read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert results.write(result(), 64, tmp_path / "bare") == [tmp_path / "bare/range_test.json"]
    assert "pip install '.[plots]'" in capsys.readouterr().out
    (tmp_path / "file").write_text("")
    with pytest.raises(results.ConfigError, match="cannot be written: .* Pass another folder"):
        results.write(result(), 64, tmp_path / "file")
