"""Where runs parted: from digests of lines and checkpoints, never guessed without them."""

import json
from pathlib import Path

import pytest

from ddl.report.parting import partings
from ddl.report.record import Record, read
from ddl.report.writing import write_report


def parted(a, b, saved_a=None, saved_b=None):
    records = [
        Record(Path(name), logged_digests=logged, saved_digests=saved or {})
        for name, logged, saved in (("a", a, saved_a), ("b", b, saved_b))
    ]
    return partings(records, ["a", "b"])


@pytest.mark.parametrize(
    ("a", "b", "text"),
    [
        (
            {10: "x", 20: "y", 30: "z"},
            {10: "x", 20: "w", 30: "v"},
            "b and a parted after step 10, the last one with the same bits, and at or before "
            "step 20.",
        ),
        ({10: "x"}, {10: "y"}, "b and a parted at or before step 10."),
        ({10: "x", 20: "y"}, {10: "x", 15: "n", 20: "y"}, "the same bits at each step compared: 2"),
        ({10: "x"}, {15: "x"}, "cannot tell whether they parted, since no step has a digest"),
        (
            {10: "x", 20: "y", 30: "z"},
            {10: "x", 20: "w", 30: "z"},
            "Yet they have the same bits at step 30",
        ),
    ],
)
def test_the_step_is_that_of_the_first_difference(a, b, text):
    (line,) = parted(a, b)
    assert text in line


def test_checkpoints_narrow_what_lines_say():
    (line,) = parted({10: "x", 40: "y"}, {10: "x", 40: "z"}, {20: "s", 30: "t"}, {20: "s", 30: "u"})
    assert "after step 20" in line
    assert "at or before step 30." in line


def test_without_digests_nothing_is_said():
    assert parted({}, {}) == []
    assert parted({10: "x"}, {}) == []


def test_each_run_is_compared_with_the_first():
    records = [Record(Path(str(n)), logged_digests={1: text}) for n, text in enumerate("xyx")]
    first, second = partings(records, ["a", "b", "c"])
    assert first.startswith("b and a parted at or before step 1.")
    assert second.startswith("c and a have the same bits")


def test_digests_are_read_from_lines_and_checkpoints_and_are_no_figures(tmp_path):
    folders = []
    for name, last in (("a", "2" * 64), ("b", "3" * 64)):
        folder = tmp_path / name
        (folder / "checkpoints").mkdir(parents=True)
        lines = [
            {"step": step, "epoch": 1.0, "split": "train", "loss": 1.0, "sha256": digest}
            for step, digest in ((10, "1" * 64), (30, last))
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
        for step, digest in ((10, "1" * 64), (20, last)):
            (folder / "checkpoints" / f"step-{step}.index").touch()
            path = folder / "checkpoints" / f"step-{step}.json"
            path.write_text(json.dumps({"sha256": digest}))
        folders.append(folder)
    (folders[0] / "checkpoints" / "step-15.index").touch()
    (folders[0] / "checkpoints" / "step-15.json").write_text("{")
    record = read(folders[0])
    assert record.logged_digests == {10: "1" * 64, 30: "2" * 64}
    assert record.saved_digests == {10: "1" * 64, 20: "2" * 64}
    assert not any("sha256" in text or "step-15" in text for text in record.warnings)
    assert ("train", "sha256") not in record.curves
    page = tmp_path / "page.html"
    line = "b and a parted after step 10, the last one with the same bits, and at or before step 20"
    assert any(line in printed for printed in write_report(folders, page))
    assert line in page.read_text()
