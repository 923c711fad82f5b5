"""The files of runs, and the table of a sweep, without processes."""

import csv
import json
import math

import pytest

from ddl.sweep.files import Progress, progress, write_status
from ddl.sweep.halving import Decision
from ddl.sweep.results import rows, settings, show, write

TRAIN = Decision("train", None)


def run_in(folder, *, total=20, saved=(), lines=(), status=None):
    """Writes the files of a run."""
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "operative_config.gin").write_text(f"SEED = 1\nTOTAL_STEPS = {total}\n")
    for step in saved:
        (folder / "checkpoints" / f"step-{step}.index").touch()
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text)
    if status is not None:
        write_status(folder, status)
    return progress(folder, "accuracy", "eval")


def line(step, value, split="eval"):
    return {"step": step, "epoch": 1.0, "split": split, "loss": 1.0, "accuracy": value}


def test_a_run_is_finished_with_the_checkpoint_of_its_last_step(tmp_path):
    found = run_in(
        tmp_path / "a", saved=[10, 20], lines=[line(10, 0.5), line(20, 0.4, "train"), line(20, 0.6)]
    )
    assert found.finished
    assert (found.step, found.total, found.values) == (20, 20, {10: 0.5, 20: 0.6})
    assert found.names == ("loss", "accuracy")
    # All is logged, but the last checkpoint is not whole: the run goes on from the one before.
    found = run_in(tmp_path / "b", saved=[10], lines=[line(10, 0.5), line(20, 0.6)])
    assert not found.over
    assert (found.step, found.saved) == (20, 10)


def test_the_exit_status_counts_where_the_files_do_not_tell(tmp_path):
    early = run_in(tmp_path / "early", saved=[10], lines=[line(10, 0.5)], status=0)
    assert early.finished
    diverged = run_in(tmp_path / "diverged", saved=[10], lines=[line(10, None)], status=76)
    assert diverged.diverged
    assert not diverged.finished
    assert math.isnan(diverged.last)
    assert not run_in(tmp_path / "none", status=0).finished  # its checkpoints were removed
    assert not run_in(tmp_path / "failed", saved=[10], status=1).over


@pytest.mark.parametrize("content", [b"", b"{", b'{"step": 3, "spl', b"\xff\n", b"[1]\n"])
def test_damaged_metrics_are_none(tmp_path, content):
    (tmp_path / "metrics.jsonl").write_bytes(content)
    (tmp_path / "ended.json").write_bytes(content)
    assert progress(tmp_path, "loss", "eval") == Progress()
    assert progress(tmp_path / "missing", "loss", "eval") == Progress()


POINTS = {f"LR={lr},SEED={seed}": {"LR": lr, "SEED": seed} for lr in ("1", "2") for seed in "01"}


def four():
    """Two settings of two seeds: one is whole, one has diverged once."""
    values = [0.5, 0.7, 0.9, math.nan]
    runs = dict(
        zip(POINTS, (Progress(20, 20, 20, True, values={20: v}) for v in values), strict=True)
    )
    runs["LR=2,SEED=1"].finished = False
    runs["LR=2,SEED=1"].diverged = True
    return rows(POINTS, runs, {}, dict.fromkeys(POINTS, TRAIN), "max")


def test_the_best_finished_run_comes_first():
    found = four()
    assert [row.name for row in found] == [
        "LR=2,SEED=0",
        "LR=1,SEED=1",
        "LR=1,SEED=0",
        "LR=2,SEED=1",
    ]
    assert found[-1].state == "diverged"


def test_states():
    runs = {name: Progress(step=5 * number) for number, name in enumerate(POINTS)}
    names = list(POINTS)
    decisions = {**dict.fromkeys(POINTS, TRAIN), names[2]: Decision("stop", 10)}
    found = rows(POINTS, runs, {names[3]: 1}, decisions, "min")
    assert [row.state for row in found] == [
        "not begun",
        "unfinished",
        "stopped at rung 10",
        "failed with status 1",
    ]


def test_settings_have_mean_and_deviation_and_whole_ones_come_first():
    first, second = settings(four(), "max")
    assert first.point == {"LR": "1"}
    assert (first.seeds, first.runs) == (2, 2)
    assert first.mean == pytest.approx(0.6)
    assert first.deviation == pytest.approx(math.sqrt(0.02))
    assert (second.seeds, second.runs, second.mean, second.deviation) == (1, 2, 0.9, None)


def test_the_table_on_a_pipe_and_the_files(tmp_path, capsys):
    found = four()
    show(found, "accuracy", "max", None)
    shown = capsys.readouterr().out
    assert "\033" not in shown
    lines = [one.split() for one in shown.splitlines() if one]
    assert lines[0] == ["LR", "SEED", "accuracy", "step", "state"]
    assert lines[1] == ["2", "0", "0.9", "20", "finished"]
    assert lines[4] == ["2", "1", "not", "finite", "20", "diverged"]
    assert lines[5] == ["LR", "mean", "accuracy", "deviation", "seeds"]
    assert lines[6] == ["1", "0.6", "0.141421", "2"]
    write(tmp_path, found, "accuracy", "eval", "max")
    content = json.loads((tmp_path / "results.json").read_text())
    assert content["best"] == "LR=2,SEED=0"
    assert [one["accuracy"] for one in content["runs"]] == [0.9, 0.7, 0.5, None]
    assert content["settings"][0]["bindings"] == {"LR": "1"}
    with (tmp_path / "results.csv").open() as file:
        table = list(csv.DictReader(file))
    assert table[0] == {
        **{"name": "LR=2,SEED=0", "LR": "2", "SEED": "0", "accuracy": "0.9", "step": "20"},
        **{"total_steps": "20", "state": "finished"},
    }


def test_the_best_run_is_bold_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    show(four(), "accuracy", "max", 80)
    shown = capsys.readouterr().out
    bold = [one for one in shown.splitlines() if "\033[1m" in one]
    assert len(bold) == 2
    assert "0.9" in bold[0]
    assert "0.6" in bold[1]


def test_nothing_is_best_if_nothing_is_finished(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    runs = {name: Progress(5, None, 20, values={5: 0.5}) for name in POINTS}
    found = rows(POINTS, runs, {}, dict.fromkeys(POINTS, TRAIN), "max")
    show(found, "accuracy", "max", 80)
    assert "\033[1m" not in capsys.readouterr().out
    write(tmp_path, found, "accuracy", "eval", "max")
    assert json.loads((tmp_path / "results.json").read_text())["best"] is None
