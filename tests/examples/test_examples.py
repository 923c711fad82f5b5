"""Each file of examples/: its command, and a dry run."""

import functools
import tempfile
from pathlib import Path

import keras
import pytest

import ddl
from ddl import config
from ddl.run import train
from tests.conftest import make_strategy

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(
    path.stem for path in (ROOT / "examples").glob("*.py") if path.with_suffix(".gin").exists()
)
SMALL = ("cnn.blocks = ((8,),)", "cnn.hidden_units = (16,)")

_INPUTS = tempfile.TemporaryDirectory(prefix="ddl-examples-")


@functools.cache
def teacher() -> str:
    """Returns the parameter with the model that is distilled."""
    path = f"{_INPUTS.name}/teacher.keras"
    ddl.models.mlp((8, 8, 1), 10, hidden_units=(4,)).save(path)
    return f"Distill.teacher = '{path}'"


# Parameters of the example that reads the result of another run.
INPUTS = {"distillation": teacher}


def text_of(example) -> str:
    return (ROOT / f"examples/{example}.gin").read_text()


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_header_gives_the_command(example):
    header = text_of(example).partition("\n#\n")[0].splitlines()
    assert all(line.startswith("# python -m ddl.main ") for line in header)
    assert f"--gin_file=examples/{example}.gin " in header[-1]
    assert header[-1].endswith(f"--model_dir=runs/{example}")


@pytest.mark.parametrize("example", EXAMPLES)
def test_a_dry_run(example, capsys, monkeypatch):
    """As of `ddl.main`, but for the export of the model, which takes as long as the rest."""
    monkeypatch.setattr(train, "export", lambda *_: None)
    params = [INPUTS[example]()] if example in INPUTS else []
    if "include 'digits_cnn" in text_of(example):
        params += SMALL
    keras.utils.clear_session()  # names as in a new process
    config.load([f"{ROOT}/examples/{example}.gin"], params)
    train.run(train.Placement(make_strategy("one_device", 1)), None, dry_run=True)
    assert "One step on one batch: " in capsys.readouterr().out
