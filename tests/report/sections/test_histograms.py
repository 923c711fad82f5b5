"""The section of histograms: the last line of the file, as it is drawn."""

import numpy as np
import pytest

from ddl.figures import HISTOGRAM_LIMITS
from ddl.report.record import Record
from ddl.report.sections.histograms import FILE, Bars, last_of, section
from ddl.run.writers import HistogramLinesWriter
from ddl.step.monitoring.histograms import Histogram

BINS = [-np.inf, *HISTOGRAM_LIMITS, np.inf]


def write(folder, step, values, layer="a/<b>"):
    histogram = Histogram(np.histogram(values, BINS)[0])
    found = {f"layer_weights/{layer}": histogram}
    HistogramLinesWriter(folder / FILE).write_histograms(step, 0.5, "train", found)


def test_the_last_whole_line_is_drawn(tmp_path):
    assert last_of(tmp_path) is None
    assert section([Record(tmp_path)], ["run"]) == []
    write(tmp_path, 10, [1.0])
    write(tmp_path, 20, [-0.3, 0.0, 0.0, 0.6, 0.7])
    with (tmp_path / FILE).open("a") as file:
        file.write('{"step": 30, "lay')
    last = last_of(tmp_path)
    assert last.step == 20
    (bars,) = last.of_layers["a/<b>"].values()
    middle = len(HISTOGRAM_LIMITS) // 2
    assert bars.first == middle - 31  # 31 powers of two from 2⁻³² to 0.5
    assert (bars.counts[0], bars.counts[31], sum(bars.counts)) == (1, 2, 5)
    (tmp_path / "none").mkdir()
    html = "".join(section([Record(tmp_path), Record(tmp_path / "none")], ["run", "other"]))
    assert "step 20" in html
    assert "a/<wbr>&lt;b&gt;" in html
    assert "0.5 to 1: 2 (40.0%)" in html
    assert "-0.5 to -0.25: 1 (20.0%)" in html
    assert "2<sup>−32</sup>" not in html
    assert "−2<sup>0</sup> to 2<sup>0</sup>" in html
    assert "other" not in html


@pytest.mark.parametrize(
    "line",
    [
        *("[]", "{", "\xff", '{"step": null}', '{"step": 1, "layer_weights/a": 5}'),
        '{"step": 1, "layer_weights/a": {"from": 0.3, "counts": [1]}}',
        '{"step": 1, "layer_weights/a": {"from": 0.5, "counts": [-1]}}',
        '{"step": 1, "layer_weights/a": {"from": 32768.0, "counts": [1, 1, 1, 1]}}',
        '{"step": 1, "layer_weights/a": {"from": 0.5, "counts": []}}',
    ],
)
def test_other_files_are_named_and_not_fatal(tmp_path, line):
    (tmp_path / FILE).write_text(line + "\n", encoding="latin-1")
    assert f"run: {FILE} cannot be read: it" in "".join(section([Record(tmp_path)], ["run"]))


def test_a_planted_link_is_not_followed(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    write(tmp_path / "elsewhere", 10, [1.0])
    (tmp_path / FILE).symlink_to(tmp_path / "elsewhere" / FILE)
    assert "cannot be read" in "".join(section([Record(tmp_path)], ["run"]))


def test_the_bars_of_the_outermost_bins_can_be_read(tmp_path):
    write(tmp_path, 10, [-1e30, 1e30])
    ((bars,),) = (each.values() for each in last_of(tmp_path).of_layers.values())
    assert bars == Bars(0, [1, *[0] * (len(HISTOGRAM_LIMITS) - 1), 1])
    assert "−2<sup>17</sup> to 2<sup>17</sup>" in "".join(section([Record(tmp_path)], ["run"]))
