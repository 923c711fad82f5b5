"""The command ddl list: kinds, parameters, documentation, misspelt names."""

import pytest

from ddl.config.explained.items import items
from ddl.config.explained.kinds import KINDS
from ddl.list import __main__ as command
from ddl.list.text import reflowed

MODULE = '''
import gin
import keras
import ddl.data

@gin.register
class Doubling:
    """Learns to double.

    Attributes:
      factor: Of the outputs.
    """
    def __init__(self, model: keras.Model, factor: float = 2.0): ...
    def per_example(self, outputs, batch): ...

@gin.register
def numbers(last: int | None = None) -> ddl.data.Source:
    """Yields numbers."""

@gin.register
def helper(text: str): ...
'''


@pytest.fixture
def run(capsys, monkeypatch):
    """Runs the command; returns its status, its output and its errors."""
    monkeypatch.delenv("COLUMNS", raising=False)

    def run(*arguments, columns=None):
        if columns:
            monkeypatch.setenv("COLUMNS", str(columns))
        status = 0
        try:
            command.run(["ddl list", *arguments])
        except SystemExit as ended:
            status = ended.code
        finally:
            for name in command.FLAGS:
                command.FLAGS[name].unparse()
        return status, *capsys.readouterr()

    return run


def test_every_item_has_a_kind_a_summary_and_documented_parameters():
    for item in items():
        assert item.kind in KINDS
        if item.origin == "keras":
            assert item.kind != "others", item.selector
        if item.origin == "ddl":
            assert item.summary, item.selector
    of_ddl = [item for item in items() if item.origin == "ddl" and item.kind != "layers"]
    parameters = [one for item in of_ddl for one in item.parameters]
    assert sum(bool(one.doc) for one in parameters) >= 0.98 * len(parameters)


def test_the_kinds(run):
    status, shown, _ = run(columns=80)
    assert status == 0
    assert max(map(len, shown.splitlines())) <= 80
    assert "\033" not in shown
    tasks = shown.partition("tasks: what a model learns\n")[2].split(":")[0]
    assert 0 <= tasks.find("Classification, ") < tasks.find("Distillation, ")  # of ddl, in order
    for kind in (*KINDS, "flags", "macros", "configs"):
        assert f"\n{kind}: " in f"\n{shown}" or kind == "others"


def test_items_in_short_and_in_full(run):
    _, shown, _ = run("schedules")
    assert "\nOneCycle(peak_learning_rate: float, decay_steps: int, rise: float = 0.3, " in shown
    assert "    One-cycle schedule: Smith & Topin 2018" in shown
    assert "schedule_begins: Literal['after_warmup', 'at_start'] | None = None)" in shown
    assert shown.index("StepDecay(") < shown.index("\nCosineDecay(")  # Keras's come last
    _, narrow, _ = run("tasks", columns=80)
    assert "Regression(model: Model,\n        loss: Literal['squared'" in narrow
    _, shown, _ = run("Retention", "Trainer.clip_norm", "@cnn()", "Dropout")
    assert "ddl.Retention, one of run; in a config: @Retention()" in shown
    assert "      last: How many of the latest checkpoints to keep." in shown
    assert "Trainer.clip_norm: float | Mapping[str, float | None] | None = None\n" in shown
    assert "    Largest global norm of the gradient of the global batch" in shown
    assert "ddl.models" not in shown.partition("cnn(")[0]
    assert "in a config: @ddl.layers.Dropout()" in shown
    assert "in a config: @keras.layers.Dropout()" in shown
    assert "also takes the parameters of its base class: activity_regularizer," in shown


def test_flags_macros_configs_and_commands(run):
    status, shown, _ = run("flags", "macros", "configs", "commands", columns=80)
    assert status == 0
    assert "--strategy: auto | one_device | " in shown
    assert "    Strategy that distributes training over the devices.\n" in shown
    assert "--gin_param: text, repeatable\n" in shown
    assert "--gin_allow_unused: text, separated by commas\n" in shown
    assert "--join_timeout: float = 60.0\n" in shown
    assert "ddl launch\n--num_workers: int\n" in shown
    assert "CLIP_NORM = None\n    Sets Trainer.clip_norm. Largest global norm" in shown
    assert "digits_cnn.gin\n    A small CNN on the 1,797 handwritten digits" in shown
    assert "\nlist        List what " in shown
    shown = run("num_packs")[1]
    assert shown.startswith("--num_packs: int = 1\n    Number of gradient buffers")
    shown = " ".join(shown.split())
    assert shown.endswith(" ddl train, ddl lr_finder, ddl show, ddl sweep, ddl replay, ddl bisect.")


def test_flags_of_one_name_are_all_listed(run):
    _, shown, _ = run("output")
    for name, text in (
        ("lr_finder", "Folder for the table and the plot."),
        ("inspect", "Folder for PNG files of the images."),
        ("convert", "New or empty folder for the files."),
        ("report", "The HTML file to write."),
        ("replay", "File for the values as arrays, which ends with .npz."),
    ):
        assert f"--output: text\n    {text}\n    A flag of ddl {name}.\n" in shown
    _, of_all, _ = run("flags")
    assert of_all.count("--output: text") == shown.count("--output: text") == 5
    assert of_all.count("--gin_file: text") == 1


def test_items_of_the_users_modules(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "doubling.py").write_text(MODULE)
    (tmp_path / "a.gin").write_text("import doubling\n")
    status, shown, errors = run("tasks", "sources", "others", "--gin_file=a.gin")
    assert status == 0, errors
    assert "\nDoubling(model: Model, factor: float = 2.0)\n    Learns to double.\n" in shown
    assert "\nnumbers(last: int | None = None)\n    Yields numbers.\n" in shown
    assert "\nhelper(text: str)" in shown
    assert "Doubling(" not in run("others", "--gin_file=a.gin")[1]
    assert "    Of the outputs." in run("Doubling.factor", "--gin_param=import doubling")[1]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("optimisers", "optimisers is no kind, item, parameter, macro or flag. Did you mean opt"),
        ("Clasification", "Did you mean Classification?"),
        ("stratgy", "Did you mean strategy?"),
        ("Trainer.clip_nrm", "Did you mean clip_norm?"),
    ],
)
def test_a_misspelt_name(name, message, run):
    status, _, errors = run(name)
    assert status == 1
    assert message in errors


def test_long_paragraphs_are_wrapped_and_code_is_not():
    doc = (
        "A summary.\n\n    x: One two three\n      four five six.\n    y: Seven.\n\n"
        "  one two three four five\n  six seven eight.\n\n```\nx = [1, 2, 3, 4, 5, 6, 7, 8]\n```"
    )
    assert reflowed(doc, 100) == doc.splitlines()
    assert reflowed(doc, 20) == [
        "A summary.",
        "",
        "    x: One two three",
        "      four five six.",
        "    y: Seven.",
        "",
        "  one two three four",
        "  five six seven",
        "  eight.",
        "",
        "```",
        "x = [1, 2, 3, 4, 5, 6, 7, 8]",
        "```",
    ]
