"""The page, the PNG files and the command: real runs are compared, also in a real browser."""

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
from ddl.run.timing.phase_times import NAME, PHASES, PhaseTimes

from ddl.errors import ConfigError, installing
from ddl.report import __main__ as command
from ddl.report import charts
from ddl.report import profiles as profiles_module
from ddl.report.bindings import bindings, differences
from ddl.report.charts import Chart
from ddl.report.finals import direction_in, rows
from ddl.report.page import page
from ddl.report.pictures import write_pictures
from ddl.report.record import Record, read
from ddl.report.sections.markup import breakable
from ddl.report.writing import write_report
from tests.report import browser
from tests.run.test_earlier_runs import COMMAND, EARLIER
from tests.run.test_earlier_runs import run as train

EVIL = "<img src=x onerror=alert(1)> $x_{ %{y} \x1b\u202e'\"&amp;"
FIGURE = "</script><script>document.title='broken'</script>"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A real run that was resumed, the run as it was, one with odd names, and an empty one."""
    folder = tmp_path_factory.mktemp("runs")
    resumed = shutil.copytree(EARLIER, folder / "new" / "run")
    for steps in (40, 60):
        flags = (f"TRAIN_STEPS = {steps}", "LOG_EVERY = 5")
        train(resumed, *COMMAND, *flags)
    earlier = shutil.copytree(EARLIER, folder / "old" / "run")
    (odd := folder / EVIL).mkdir()
    lines = [
        {"step": step, "epoch": step, "split": split, "loss": 9.0, FIGURE: step, "f1/10": 1.0}
        | {"\x00\n": None if step % 2 else 1.0, "f1/2": 0.0}
        for step in range(10)
        for split in ("train", "<b>")
    ]
    (odd / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "empty").mkdir()
    return [resumed, earlier, odd, folder / "empty"]


@pytest.fixture(scope="module")
def report(runs, tmp_path_factory):
    """The page of all runs, the folder of the PNG files, and the printed lines."""
    folder = tmp_path_factory.mktemp("report")
    # A run given twice is shown once.
    given = [*runs, runs[0].parent / "." / "run"]
    lines = write_report(given, folder / "new" / "page.html", folder / "png")
    return folder / "new" / "page.html", folder / "png", lines


class Reader(HTMLParser):
    """The tables of a page as lists of rows, and its elements."""

    def __init__(self, text):
        super().__init__()
        self.tables, self.elements, self._cell = [], [], None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("th", "td"):
            self._cell = ""
        elif tag == "b" and self._cell is not None:
            self._cell += "*"

    def handle_endtag(self, tag):
        if tag in ("th", "td"):
            self.tables[-1][-1].append(self._cell)
            self._cell = None

    def handle_data(self, text):
        if self._cell is not None:
            self._cell += text


def test_the_tables(report, runs):
    page, _, lines = report
    of_runs, finals, times, of_configs = Reader(page.read_text()).tables
    name = r"<img src=x onerror=alert(1)> $x_{ %{y} \x1b\u202e'" + '"&amp;'
    assert [row[0] for row in of_runs[1:]] == ["new/run", "old/run", name, "empty"]
    assert [row[1] for row in of_runs[1:]] == [
        *("finished: step 60 of 60", "finished: step 20 of 20"),
        *("ended, or waits to be resumed: step 9", "empty"),
    ]
    assert finals[0][1:] == ["new/run", "old/run", name]  # the empty run has no values
    resumed = [json.loads(line) for line in (runs[0] / "metrics.jsonl").read_text().splitlines()]
    accuracies = {x["step"]: x["accuracy"] for x in resumed if x["split"] == "eval"}
    place = finals.index(["*eval"])
    row = next(row for row in finals[place:] if row[0].startswith("accuracy"))
    assert row[0] == "accuracy ↑"
    assert row[1].startswith(f"*{accuracies[60]:.6g}")
    assert row[2] == "0.311111"
    assert row[3] == "–"
    learning_rate = next(row for row in finals if row[0] == "learning_rate")
    assert learning_rate[1:] == ["0.05", "0.05", "–"]  # ddl knows no better one
    assert "process_memory_mib" not in [row[0] for row in finals]
    assert times[0] == ["kind of work", "new/run"]  # the other runs have not counted their time
    spent = {row[0]: row[1] for row in times[1:]}
    assert re.fullmatch(r"\d+\.\d%", spent["goodput"])
    assert re.fullmatch(r"\d+\.\d s \(\d+\.\d%\)", spent["tracing"])
    assert spent["starts"] == "2"
    assert dict(zip(of_runs[0], of_runs[1], strict=True))["goodput"] == spent["goodput"]
    differing = {row[0]: row[1:] for row in of_configs[1:]}
    assert differing["TOTAL_STEPS"] == ["60", "20"]
    assert differing["LOG_EVERY"] == ["5", "100"]
    assert differing["Classification.metrics"] == ["()", "–"]  # later than that version
    assert "LEARNING_RATE" not in differing
    text = "\n".join(lines)
    assert "Restarted at least once. First logs after a restart: step 45." in text
    assert "Restarted at least once. First logs after a restart: step 45." in page.read_text()
    assert r"\x00\n (train) is not finite in 5 of 10 lines, first at step 1." in page.read_text()


def test_the_page_is_whole_and_safe(report):
    text = report[0].read_text()
    elements = Reader(text).elements
    assert not [e for e in elements if e[0] in ("img", "link", "iframe") or "src" in e[1]]
    assert len([tag for tag, _ in elements if tag == "script"]) == 3
    (policy,) = (a["content"] for tag, a in elements if a.get("http-equiv"))
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert not re.search(
        r"[\x00-\x08\x0b-\x1f\u202e]", re.sub(r"(?s)<script>.*?</script>", "", text)
    )
    data = json.loads(re.search(r'(?s)id="data">(.*?)</script>', text)[1])
    names = [chart["name"] for chart in data["charts"]]
    assert names[0] == "loss"
    assert names.index("f1/2") < names.index("f1/10") < names.index("learning_rate")
    shares = names[names.index("examples_per_second") + 1 :]
    assert "time_share/tracing" in shares
    assert shares[-1] == "process_memory_mib"
    assert "time/tracing" not in names  # drawn when it is named
    assert data["runs"][0]["restarts"] == [45]
    loss = data["charts"][0]["curves"]
    assert [(curve["run"], curve["split"]) for curve in loss][:3] == [
        *((0, "train"), (0, "eval"), (1, "train"))
    ]
    assert loss[0]["step"] == [20, *range(25, 61, 5)]


def test_pictures(report):
    files = sorted(path.name for path in report[1].iterdir())
    assert {"loss.png", "accuracy.png", "f1_2.png", "figure.png"} <= set(files)
    assert len(files) == len(re.findall(r'class="chart"', report[0].read_text()))
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in report[1].iterdir())


@pytest.mark.filterwarnings("ignore:No artists")
def test_a_planted_link_is_not_followed(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "loss.png").symlink_to(tmp_path / "mine")
    (picture,) = write_pictures([Chart("loss", [], "")], [], [], tmp_path)
    assert (tmp_path / "mine").read_text() == "mine"
    assert not picture.is_symlink()


@pytest.mark.skipif(browser.COMMAND is None, reason="needs Chromium")
def test_in_a_browser(report, tmp_path):
    page = browser.Browser(tmp_path / "profile", 1280, 900)
    try:
        page.call("Page.navigate", url=report[0].as_uri())
        page.wait("document.readyState === 'complete'")
        chart = "document.querySelector('.chart')"
        page.value(f"{chart}.scrollIntoView()")
        page.wait(f"!!{chart}.querySelector('.main-svg')")
        box = json.loads(page.value(f"JSON.stringify({chart}.getBoundingClientRect())"))
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        page.mouse("Moved", x, y)
        page.mouse("Moved", x + 1, y)
        hovered = f"{chart}.querySelector('.hoverlayer').textContent"
        assert re.search(r"\d+new/run · train : 1\.\d+", page.wait(hovered))
        for moved in range(45):  # to the left, where the run with the odd name is
            page.mouse("Moved", x - 5 * moved, y)
        page.wait(f"{hovered}.includes('<img src=x')")
        assert "&amp; · train" in page.value(hovered)
        before = page.value(f"{chart}._fullLayout.xaxis.range.join()")
        page.mouse("Pressed", x, y, button="left", clickCount=1)
        for moved in (20, 60, 100):
            page.mouse("Moved", x + moved, y + moved / 2, button="left", buttons=1)
        page.mouse("Released", x + 100, y + 50, button="left", clickCount=1)
        page.wait(f"{chart}._fullLayout.xaxis.range.join() !== '{before}'")
        page.value("document.getElementById('log').click()")
        page.value("document.querySelector('input[value=epoch]').click()")
        page.value("document.querySelector('input[data-run]').click()")
        page.wait(f"{chart}._fullLayout.yaxis.type === 'log'")
        page.wait(f"{chart}._fullLayout.xaxis.title.text === 'epoch'")
        visible = f"{chart}._fullData.map(t => t.visible).slice(0, 3).join()"
        page.wait(f"{visible} === 'false,false,true'")
        ink = page.value("getComputedStyle(document.body).color")
        dark = {"name": "prefers-color-scheme", "value": "dark"}
        page.call("Emulation.setEmulatedMedia", features=[dark])
        page.wait(f"getComputedStyle(document.body).color !== '{ink}'")
        phone = {"width": 400, "height": 800, "deviceScaleFactor": 1, "mobile": True}
        page.call("Emulation.setDeviceMetricsOverride", **phone)
        # All charts come near the screen in turn; none is wider than it.
        charted = page.value("document.querySelectorAll('.chart').length")
        for number in range(charted):
            one = f"document.querySelectorAll('.chart')[{number}]"
            page.value(f"{one}.scrollIntoView()")
            page.wait(f"!!{one}.querySelector('.main-svg')")
        page.wait("document.documentElement.scrollWidth === 400")  # once all are resized
        assert page.value("document.title") == "4 runs · ddl report"
        assert page.errors == []
        assert {url.partition(":")[0] for url in page.requests} <= {"file", "data"}
    finally:
        page.close()


def curve_of(*values):
    curve = charts.Curve()
    for step, value in enumerate(values):
        curve.add(step, step, value)
    return curve


def test_profiles_come_in_the_order_of_their_steps(tmp_path, monkeypatch):
    """Those that are left out are the last ones."""
    times = dict.fromkeys(PHASES, 1.0)
    monkeypatch.setattr(profiles_module, "_MOST", 2)
    monkeypatch.setattr(
        profiles_module,
        "read",
        lambda path: PhaseTimes(int(path.parent.name.rpartition("-")[2]), 9, "CPUs", times),
    )
    for name in ("after-step-100", "after-step-20", "after-step-9"):
        (tmp_path / "profile" / name).mkdir(parents=True)
        (tmp_path / "profile" / name / NAME).write_text("")
    found, faults = profiles_module.profiles(tmp_path)
    assert [one.first for _, one in found] == [9, 20]
    assert "first 2" in faults[0]


def test_the_table_of_profiles():
    times = {"forward": 1.0, "backward": 2.0, "all_reduce": 0.0, "update": 0.5, "other": 0.5}
    profiled = Record(Path("one"), profiles=[("steps 4 to 9", PhaseTimes(4, 9, "CPUs", times))])
    text = page([profiled, Record(Path("two"))], ["one", "<two>"], [], [], [], "")
    assert "one<small>steps 4 to 9</small>" in text
    assert '>backward pass</th><td class="number">2 ms (50.0%)</td>' in text
    assert "Profiles" not in page([Record(Path("two"))], ["two"], [], [], [], "")


def test_names_break_at_their_parts_and_not_within_numbers():
    name = "LEARNING_RATE=0.05,SEED=0 <b>"
    assert breakable(name) == "LEARNING_<wbr>RATE=0.05,<wbr>SEED=0 &lt;b&gt;"
    text = page([Record(Path("runs/x"))], [name], [], [], [], "")
    assert f'<th scope="row" class="breaks">{breakable(name)}</th>' in text
    assert "runs/<wbr>x</td>" in text


def test_the_direction_of_better_is_that_of_the_configs():
    one = Record(Path("one"), curves={("eval", "AUC"): curve_of(0.9, 0.8)})
    two = Record(Path("two"), curves={("eval", "AUC"): curve_of(0.7, float("nan"))})
    three = Record(Path("three"), curves={("eval", "AUC"): curve_of(0.8)})
    every = [one, two, three]
    assert direction_in(every, "AUC") is None
    assert not any(final.wins for final in rows(every)[0].finals)
    text = "Retention.best_metric = %M\nM = 'AUC'\nRetention.best_mode = 'max'\n"
    one.bindings, _ = bindings(text, "a.gin")
    assert [final.wins for final in rows(every)[0].finals] == [True, False, True]
    assert [final.best[1] for final in rows(every)[0].finals] == [0.9, 0.7, 0.8]
    three.sanity_mode = "overfit_batch"
    assert [final.wins for final in rows(every)[0].finals] == [False, False, False]
    text = "EarlyStopping.metric = 'AUC'\nEarlyStopping.mode = 'min'\n"
    two.bindings, _ = bindings(text, "a.gin")
    assert direction_in(every, "AUC") is None
    assert [direction_in(every, name) for name in ("loss", "accuracy", "top_5_accuracy")] == [
        *("min", "max", "max")
    ]


def test_bindings_are_values_not_text():
    text = "# A = 9\nimport a.b\nA = 1\nx/f.a = [1,\n    2]\nf.b = \\\n    {'c': 3}\n"
    text += 'A = 2e-1\n\ng:\n  c = "t"\n  d = @s/h()\n  e = %A\n'
    found, fault = bindings(text, "a.gin")
    assert fault is None
    of_g = {"g.c": "'t'", "g.d": "@s/h()", "g.e": "%A"}
    assert found == {"import a.b": "yes", "x/f.a": "[1, 2]", "f.b": "{'c': 3}", "A": "0.2", **of_g}
    other, _ = bindings("A = 1\ng.c = 't'\ng.d = @s/h()\ng.e = %A\n", "a.gin")
    assert [each.name for each in differences([found, other])] == [
        "A",
        "import a.b",
        *("x/f.a", "f.b"),
    ]
    assert differences([found, found]) == []


@pytest.mark.parametrize("end", ["b = [1,", "'", "b = 0x" + "f" * 5000, "b = " + "[" * 9999])
def test_the_bindings_before_a_fault_are_kept(end):
    found, fault = bindings(f"A = 1\n{end}", "a.gin")
    assert found == {"A": "1"}
    assert str(fault).startswith("a.gin:")


def test_includes_of_a_saved_config_are_not_opened(tmp_path):
    (tmp_path / "secret.gin").write_text("PASSWORD = 'abc'\n")
    found, fault = bindings(f"A = 1\ninclude '{tmp_path}/secret.gin'\nB = 2\n", "a.gin")
    assert found == {"A": "1"}
    assert "must have no include" in str(fault)


@pytest.fixture
def run(capsys):
    """Runs the command; returns its status and its output."""

    def run(*arguments):
        status = 0
        try:
            command.run(["ddl.report", *map(str, arguments)])
        except SystemExit as ended:
            status = ended.code
        finally:
            for name in command.FLAGS:
                command.FLAGS[name].unparse()
        captured = capsys.readouterr()
        return status, captured.out + captured.err

    return run


def test_the_command(run, runs, tmp_path, monkeypatch):
    monkeypatch.setattr("ddl.report.writing.MOST_CHARTS", 2)
    status, shown = run(runs[0], runs[3], f"--output={tmp_path}/a.html")
    assert status == 0
    assert "empty: empty\n  The directory is empty." in shown
    assert re.search(r"Wrote .*/a.html \([45]\.\d MB, 2 charts\)", shown)
    assert re.search(r"\n  Goodput \d+\.\d%: .* in 2 starts; ", shown)
    assert re.search(r"\d further figures have no chart", shown)
    assert "learning_rate, examples_per_second" in (tmp_path / "a.html").read_text()
    status, shown = run(runs[0], f"--output={tmp_path}/a.html", "--figures=learn*,time/trac*")
    assert (status, "2 charts" in shown) == (0, True)
    # A directory without any metric has a page without scripts.
    status, shown = run(f"--output={tmp_path}/b.html", runs[3])
    assert (status, "0.0 MB, 0 charts" in shown) == (0, True)
    assert "<script" not in (tmp_path / "b.html").read_text()


def test_wrong_command_lines(run, runs, tmp_path):
    output = f"--output={tmp_path}/page.html"
    (tmp_path / "file").write_text("")
    for arguments, message in (
        ([output], "A run is required"),
        ([runs[0]], "--output is required"),
        ([runs[0], "--output="], "--output must be a path, got an empty text"),
        ([runs[0], output, "--pictures="], "--pictures must be a path"),
        ([runs[0], output, output], "Pass this flag once"),
        (
            [runs[0], tmp_path / "gone", output],
            "gone, which is none, or cannot be reached. Pass a --model_dir",
        ),
        ([tmp_path / "file", output], "must be the directory of a run"),
        ([runs[0], f"--output={runs[0]}/metrics.jsonl"], "must be a file whose name ends in .html"),
        ([runs[0], f"--output={tmp_path}/file/page.html"], "page.html cannot be written"),
        ([runs[0], output, f"--pictures={tmp_path}/file"], "file cannot be written"),
        (
            [runs[0], output, "--figures=loss,accurcy"],
            "--figures=accurcy: no run has such a figure",
        ),
    ):
        status, shown = run(*arguments)
        assert (status, message in shown) == (1, True), shown
        assert "Traceback" not in shown


@pytest.mark.parametrize(
    ("arguments", "name"), [({"runs": "ab"}, "runs"), ({"runs": [], "figures": "loss*"}, "figures")]
)
def test_a_text_is_not_read_letter_by_letter(tmp_path, arguments, name):
    with pytest.raises(ConfigError, match=f"write_report.{name} must be a list, got the text"):
        write_report(output=tmp_path / "page.html", **arguments)


@pytest.mark.parametrize(("library", "flags"), [("plotly", []), ("matplotlib", ["--pictures=x"])])
def test_a_missing_library_is_named(run, runs, tmp_path, monkeypatch, library, flags):
    import sys

    monkeypatch.setitem(sys.modules, f"{library}.offline", None)
    monkeypatch.setitem(sys.modules, f"{library}.figure", None)
    status, shown = run(runs[1], f"--output={tmp_path}/page.html", *flags)
    assert status == 1
    assert f"needs {library}, which cannot be imported" in shown
    assert installing("report") in shown
    assert not (tmp_path / "page.html").exists()


def test_reading_changes_nothing(runs):
    before = {path: path.stat().st_mtime_ns for path in runs[0].rglob("*")}
    read(runs[0])
    assert before == {path: path.stat().st_mtime_ns for path in runs[0].rglob("*")}
