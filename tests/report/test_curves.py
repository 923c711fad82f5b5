"""Curves in bounded memory, and the reading of metrics.jsonl into them."""

import json
import math

import numpy as np

from ddl.report import curves
from ddl.report.curves import Curve
from ddl.report.lines import Metrics


def test_a_long_curve_keeps_its_ends_peaks_and_gaps(monkeypatch):
    monkeypatch.setattr(curves, "_CAPACITY", 500)
    monkeypatch.setattr(curves, "_RANGES", 64)
    values = np.random.default_rng(0).normal(size=20_000)
    values[[7_000, 12_345]] = 50, -60
    values[15_000] = math.inf
    curve = Curve()
    for step, value in enumerate(values):
        curve.add(step, step / 10, value)
        assert len(curve._kept) + len(curve._new) <= 1_000
    rows = curve.rows(16)
    assert len(rows) <= 5 * 16
    assert (np.diff(rows[:, 0]) > 0).all()
    assert {0, 7_000, 12_345, 19_999} <= set(rows[:, 0])
    for step, epoch, value in rows:
        assert epoch == step / 10
        assert value == values[int(step)] or (step == 15_000 and math.isnan(value))
    assert np.isnan(rows[:, 2]).sum() == 1
    assert curve.points == 20_000
    assert (curve.not_finite, curve.first_not_finite) == (1, 15_000)
    assert curve.best("max") == (7_000, 50)
    assert curve.best("min") == (12_345, -60)
    assert curve.last == (19_999, values[-1])
    # Every range of steps has its own extremes.
    for first in range(0, 20_000, 1_250):
        here = values[first : first + 1_250]
        kept = rows[(rows[:, 0] >= first - 400) & (rows[:, 0] < first + 1_650), 2]
        assert np.nanmax(kept) >= here[np.isfinite(here)].max()
        assert np.nanmin(kept) <= here[np.isfinite(here)].min()


def test_the_first_of_equal_points_is_the_best(monkeypatch):
    monkeypatch.setattr(curves, "_CAPACITY", 50)
    monkeypatch.setattr(curves, "_RANGES", 4)
    curve = Curve()
    for step in range(500):  # 8 from step 101 on, 2 from step 301 on, each ten times
        curve.add(step, 0, 8 if step % 100 in range(1, 11) and step > 100 else 5 - 3 * (step > 300))
    assert curve.best("max") == (101, 8)
    assert curve.best("min") == (311, 2)


def test_a_short_curve_is_whole_and_a_repeated_step_counts_once():
    curve = Curve()
    for step, value in [(10, 1.0), (20, 0.5), (20, 0.7), (15, math.nan), (30, math.nan)]:
        curve.add(step, math.nan, value)
    assert curve.rows(400)[:, 0].tolist() == [10, 15, 20, 30]
    assert curve.rows(400)[2, 2] == 0.7
    assert math.isnan(curve.last.value)
    assert curve.best("min") == (20, 0.7)
    for _ in range(2):
        curve.add(10, 0, math.nan)
    assert curve.best("max") == (20, 0.7)


def test_lines_that_cannot_be_read_are_counted(tmp_path):
    def line(step, **values):
        return json.dumps({"step": step, "epoch": step / 2, "split": "train", **values}) + "\n"

    huge = '{"step": 5, "split": "train", "loss": 1%s}\n' % ("0" * 400)
    lines = [
        line(1, loss=3.0, accuracy=None),
        '{"step": 2, "split": "train", "loss": NaN}\n{"step": 3, "loss": -Infinity}\n',
        "no JSON\n\n" + '{"loss": 1}\n[1]\n{"step": 4, "split": 7}\n',
        huge,
        line(9, loss=True, accuracy="high"),
        line(8, loss=2.0, **{"": 1.0, "\x00<b>": 2.0}),
        '{"step": 10, "padding": "' + "x" * 2**21 + '"}\n',
        line(10, loss=1.0)[:-9],
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(lines))
    metrics = Metrics(path)
    assert metrics.lines == 6
    assert (metrics.last_step, metrics.last_epoch) == (9, 4.5)
    rows = metrics.curves["train", "loss"].rows(400)
    np.testing.assert_array_equal(
        rows[:, [0, 2]], [[1, 3], [2, np.nan], [3, np.nan], [5, np.nan], [8, 2]]
    )
    assert set(metrics.curves) == {("train", n) for n in ("loss", "accuracy", "", "\x00<b>")}
    told = "\n".join(metrics.faults)
    assert "5 lines of metrics.jsonl cannot be read and are left out: number 4, 6, 7, …" in told
    assert "The last line of metrics.jsonl is incomplete" in told
    assert "The steps of the train lines go back 1 time" in told
    assert "loss is no number in 1 line" in told
    assert "loss (train) is not finite in 3 of 5 lines, first at step 2" in told


def test_figures_without_end_are_cut(tmp_path, monkeypatch):
    monkeypatch.setattr("ddl.report.lines._MOST_FIGURES", 10)
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {n}, "f{n}": 1, "g{n}": "x"}}\n' for n in range(50)))
    metrics = Metrics(path)
    assert len(metrics.curves) == 10
    assert "more than 10 figures" in metrics.faults[-1]
