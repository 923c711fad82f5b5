"""Each file of examples/: its command, a dry run, and one of them on two replicas."""

import functools
import json
import tempfile
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl import config
from ddl.distribution.communication import Communication
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


def run(example, model_dir, strategy, *more, **arguments):
    """Makes a run of `ddl.main` in this process."""
    params = [INPUTS[example]()] if example in INPUTS else []
    if "include 'digits_cnn" in text_of(example):
        params += SMALL
    keras.utils.clear_session()  # names as in a new process
    config.load([f"{ROOT}/examples/{example}.gin"], [*params, *more])
    train.run(train.Placement(make_strategy(*strategy), Communication()), model_dir, **arguments)


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_header_gives_the_command(example):
    header = text_of(example).partition("\n#\n")[0].splitlines()
    assert all(line.startswith("# python -m ddl.main ") for line in header)
    assert f"--gin_file=examples/{example}.gin " in header[-1]
    assert header[-1].endswith(f"--model_dir=runs/{example}")


@pytest.mark.parametrize("example", EXAMPLES)
def test_a_dry_run(example, capsys):
    run(example, None, ("one_device", 1), dry_run=True)
    assert "One step on one batch: " in capsys.readouterr().out


def trained(example, model_dir, strategy) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Returns the tensors of the checkpoint after 4 updates, and the logged figures."""
    plan = ("TRAIN_STEPS = 4", "LOG_EVERY = 4", "EVAL_EVERY = None", "CHECKPOINT_EVERY = 4")
    run(example, str(model_dir), strategy, *plan, "PRECISION = 'float64'", mode="train")
    reader = tf.train.load_checkpoint(str(model_dir / "checkpoints"))
    names = reader.get_variable_to_dtype_map()
    tensors = {
        name: reader.get_tensor(name)
        for name, dtype in names.items()
        if dtype == tf.float64 and not name.startswith("state/")
    }
    (line,) = (model_dir / "metrics.jsonl").read_text().splitlines()
    figures = {name: x for name, x in json.loads(line).items() if name.startswith("loss")}
    return tensors, figures


def test_the_same_on_two_replicas(tmp_path):
    """Weights and slots are equal in float64. tests/contract/test_own_steps.py has other steps."""
    expected, losses = trained("gan", tmp_path / "one", ("one_device", 1))
    found, ours = trained("gan", tmp_path / "two", ("mirrored", 2))
    assert found.keys() == expected.keys()
    assert len(expected) > 4
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-10, err_msg=name)
    assert losses
    assert ours == pytest.approx(losses, rel=0, abs=1e-10)
