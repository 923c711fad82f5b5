"""The command ddl show: where values come from, and how two configs differ."""

import pytest

from ddl import config
from ddl.show import __main__ as command

BASE = """include 'standard.gin'
GLOBAL_BATCH_SIZE = 8
TRAIN_STEPS = 10
UNUSED = 1
Trainer.optimizer = @FusedSGD()
FusedSGD.learning_rate = 0.1
cnn.blocks = ((32, 32, 32, 32, 32, 32, 32, 32, 32, 32, 32, 32, 32, 32, 32, 32, 32, 32, 32), (64,))
"""
OTHER = """include 'base.gin'
TRAIN_STEPS = 20
Trainer.optimizer = @LAMB()
LAMB.learning_rate = 0.1
Trainer.clip_norm = None  # as before, through no macro
"""


@pytest.fixture
def run(tmp_path, capsys, monkeypatch):
    """Runs the command in a folder with configs and runs; returns status, output and errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    (tmp_path / "base.gin").write_text(BASE)
    (tmp_path / "other.gin").write_text(OTHER)

    def run(*arguments, columns=None):
        if columns:
            monkeypatch.setenv("COLUMNS", str(columns))
        status = 0
        try:
            command.run(["ddl show", *arguments, "--gin_allow_unused=UNUSED,FusedSGD.*"])
        except SystemExit as ended:
            status = ended.code
        finally:
            for name in command.FLAGS:
                command.FLAGS[name].unparse()
        return status, *capsys.readouterr()

    return run


def test_each_value_has_its_place_and_what_it_overrides(run, tmp_path):
    status, shown, errors = run(
        "--gin_file=other.gin",
        "--gin.CLIP_NORM=1.0",
        "--gin_param=TRAIN_STEPS = 30",
        "--strategy=mirrored",
        "--model_dir=x",
    )
    assert status == 0, errors
    assert "\033" not in shown
    lines = {line.partition(" = ")[0]: line.partition(" = ")[2] for line in shown.splitlines()}
    history = {name: text.partition("# ")[2] for name, text in lines.items()}
    assert lines["TRAIN_STEPS"].startswith("30 ")
    assert history["TRAIN_STEPS"] == (
        "--gin_param 'TRAIN_STEPS = 30', overrides 20 of other.gin:2, then 10 of base.gin:3, then "
        "None of ddl/standard.gin:6"
    )
    assert history["CLIP_NORM"].startswith("--gin_param 'CLIP_NORM=1.0', overrides None of ddl/")
    assert history["GLOBAL_BATCH_SIZE"] == "base.gin:2, overrides None of ddl/standard.gin:4"
    assert history["Trainer.optimizer"] == "other.gin:3, overrides @FusedSGD() of base.gin:5"
    assert history["RunPlan.train_steps"].startswith("= 30, ddl/standard.gin:")
    assert "#   --strategy=mirrored\n" in shown
    assert "#   --model_dir=x\n" in shown
    given = config.config_text()
    # The output is a config with the same values.
    (tmp_path / "shown.gin").write_text(shown)
    config.load(["shown.gin"])
    assert config.config_text() == given


def test_on_a_narrow_terminal_the_text_stays_a_config(run, tmp_path):
    _, shown, _ = run("other.gin", "--gin_param=TRAIN_STEPS = 30", "--defaults", columns=80)
    given = config.config_text()
    comments = [line for line in shown.splitlines() if line.lstrip().startswith("#")]
    assert max(map(len, comments)) <= 80
    assert "TRAIN_STEPS = 30\n    # --gin_param 'TRAIN_STEPS = 30', overrides 20 of" in shown
    assert "\n# LAMB.beta_1 = 0.9\n" in shown
    assert "\n# Retention.last = 3\n" in shown
    assert "# Trainer.strategy" not in shown  # the flags set it
    (tmp_path / "shown.gin").write_text(shown)
    config.load(["shown.gin"])
    assert config.config_text() == given


def test_how_two_configs_differ(run):
    status, shown, errors = run("base.gin", "other.gin")
    assert status == 0, errors
    assert shown.startswith("--- base.gin\n+++ other.gin\nTRAIN_STEPS\n")
    assert "TRAIN_STEPS\n  - 10  # base.gin:3\n  + 20  # other.gin:2\n" in shown
    assert "Trainer.optimizer\n  - @FusedSGD()  # base.gin:5\n  + @LAMB()  # other.gin:3\n" in shown
    assert "LAMB.learning_rate\n  - (nothing refers to LAMB)\n  + 0.1  # other.gin:4\n" in shown
    assert "Trainer.clip_norm" not in shown  # None by a macro and None are the same value
    assert "UNUSED" not in shown
    assert "\n3 values differ; " in shown
    status, shown, _ = run("base.gin", "--gin_file=base.gin", "--gin_param=UNUSED = 2")
    assert "--- base.gin\n+++ base.gin UNUSED = 2\nUNUSED\n  - 1  # base.gin:4\n  + 2" in shown
    assert "\n1 value differs; " in shown
    assert "\nNo values differ; " in run("base.gin", "base.gin")[1]


def test_folders_of_runs(run, tmp_path):
    for name, text in (
        ("one", "Trainer.clip_norm = 1\n"),
        # As an older version may have written it, or one with a module that is gone.
        ("old", "import gone\nTrainer.clip_norm = 1.0\nTrainer.gone = 3\nGone.size = 1\n"),
        ("empty", None),
    ):
        (tmp_path / name).mkdir()
        if text is not None:
            (tmp_path / name / "config.gin").write_text(text)
    (tmp_path / "one" / "operative_config.gin").write_text("SEED = 5\n")
    status, shown, errors = run("one", "old")
    assert status == 0
    assert "old/config.gin is compared without checks, since this version rejects it: " in errors
    assert "Trainer.gone\n  - not set\n  + 3  # old/config.gin:3\n" in shown
    assert "Gone.size\n  - (nothing refers to Gone)\n  + 1  # old/config.gin:4\n" in shown
    assert "+ import gone\n" in shown
    assert "Trainer.clip_norm" not in shown
    assert run("one", "--used")[1].startswith("SEED = 5  # one/operative_config.gin:1\n")
    status, _, errors = run("one", "empty")
    assert status == 1
    assert "empty must be the folder of a run, with the file config.gin, but it is empty" in errors
    assert "Cannot import gone" in run("old")[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "takes one config, or two to compare, got 0"),
        (["a.gin", "b.gin", "c.gin"], "got 3"),
        (["a.gin", "b.gin", "--gin_param=A = 1"], "--gin_param changes one config. Pass that"),
        (["a.gin", "b.gin", "--defaults"], "--defaults has no effect on a comparison"),
        (["a.gin", "--gpus=first"], "numbers such as 0,1, got 'first'"),
        (["a.gin", "--checkpoint=best"], "--checkpoint has no effect with --mode=train_and_eval"),
        (["bse.gin"], "There is no config file bse.gin. Did you mean base.gin?"),
        (["base.gin", "--gin_param=Trainer.clip_nrm = 1"], "Did you mean clip_norm?"),
    ],
)
def test_slips(arguments, message, run):
    status, _, errors = run(*arguments)
    assert status == 1
    assert message in errors
    assert "Traceback" not in errors
