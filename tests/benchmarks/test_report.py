import json

import pytest

from benchmarks import report
from benchmarks.command import title_and_text
from benchmarks.report import Bar, Images, Plot, Report, Series, Spread, Table


@pytest.mark.parametrize(
    ("kind", "value", "verdict"),
    [
        ("at least", 1.5, "met"),
        ("at least", 1.4, "missed"),
        ("at least", Spread(1.6, 1.5, 2.0), "met"),
        ("at least", Spread(1.49, 1.4, 2.0), "open"),
        ("at least", Spread(1.3, 1.2, 1.4), "missed"),
        ("at most", 1.5, "met"),
        ("at most", Spread(1.45, 1.0, 1.5), "met"),
        ("at most", Spread(1.45, 1.0, 2.0), "open"),
        ("at most", Spread(1.7, 1.6, 2.0), "missed"),
    ],
)
def test_a_target_is_open_if_the_interval_holds_it(kind, value, verdict):
    assert Bar("speed", value, 1.5, kind).verdict == verdict


def test_json_holds_all():
    report = Report(
        [Table("times", ["what", "ms"], [["a", Spread(2.0, 1.0, 3.0)], ["b", 4]])],
        [Bar("b / a", Spread(2.0, 1.0, 3.0), 1.5)],
        [Plot("times", "n", "ms", [Series("a", [1, 2], [Spread(2.0, 1.0, 3.0), 0.5])], log_x=True)],
        ["a note"],
        [Images("digits", ["0f", "f0"])],
    )
    assert Report.from_json(json.loads(json.dumps(report.as_json()))) == report


def test_a_result_without_images_is_read():
    values = Report([], notes=["a note"]).as_json()
    del values["images"]
    read = Report.from_json(values)
    assert (read.notes, list(read.images)) == (["a note"], [])


def test_a_docstring_is_title_and_text():
    docstring = """What it costs: python -m benchmarks.cost.

    One line
    and its end.

    Another.
    """
    assert title_and_text(docstring) == ("What it costs", "One line and its end.\n\nAnother.")


def test_a_plot_of_a_table_has_a_group_a_row_and_leaves_out_what_is_no_figure():
    rows = [["a name of two lines", 1.0, "–"], ["b", 2.0, Spread(3.0, 2.0, 4.0)]]
    plot = report.plot_of(Table("t", ["what", "x", "y"], rows), ["x", "y"], "s", level=1.0)
    assert (plot.title, plot.x_label, plot.y_label, plot.level) == ("t", "what", "s", 1.0)
    first, second = plot.series
    assert (first.name, first.x, first.y) == ("x", ["a name of two\nlines", "b"], [1.0, 2.0])
    assert (second.name, second.x, second.y) == ("y", ["b"], [Spread(3.0, 2.0, 4.0)])
