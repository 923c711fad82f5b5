"""Each file of examples/, as a user starts it: on any devices, killed, evaluated and exported."""

import functools
import signal
import sys
import tempfile
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.distribution.whole_clusters import finish, launch
from tests.processes import forked
from tests.run.whole_runs import ROOT, tensors

EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))
SHORT = ("TRAIN_STEPS = 20", "LOG_EVERY = 10", "CHECKPOINT_EVERY = 10", "PRECISION = 'float64'")
TWO = ["--strategy=mirrored", "--num_virtual_devices=2"]
FOUR = ["--strategy=mirrored", "--num_virtual_devices=4"]

_INPUTS = tempfile.TemporaryDirectory(prefix="ddl-examples-")


@functools.cache
def trained_before(config: str, *modes: str) -> Path:
    """Returns the model directory of a config that was trained for a few steps in float64."""
    model_dir = Path(_INPUTS.name) / Path(config).stem
    command = [
        *(sys.executable, "-m", "ddl.main", f"--gin_file={ROOT}/{config}"),
        *(f"--model_dir={model_dir}", "--strategy=one_device"),
        *(f"--gin_param={param}" for param in (*SHORT, "EVAL_EVERY = None")),
    ]
    for mode in modes:
        forked.run([*command, f"--mode={mode}"], cwd=ROOT, check=True)
    return model_dir


def teacher() -> str:
    """Returns the parameter with the exported teacher of the distillation."""
    model_dir = trained_before("configs/digits_cnn.gin", "train", "export")
    return f"Distillation.teacher = '{model_dir}/export/model.keras'"


def pretrained() -> str:
    """Returns the parameter with the run whose layers are fine-tuned."""
    return f"WarmStart.checkpoint = '{trained_before('configs/digits_cnn.gin', 'train', 'export')}'"


NORMALIZED = {"byol"}  # examples with batch normalization
# Parameters of the examples that read the result of another run.
INPUTS = {"distillation": teacher, "fine_tuning": pretrained}


def flags(example, model_dir, *params):
    config = (ROOT / f"examples/{example}.gin").read_text()
    evaluated = ("Trainer.eval_data", "include 'digits", "include 'from_scratch")
    evaluates = any(text in config for text in evaluated)
    every = ["EVAL_EVERY = 10"] if evaluates else []
    inputs = [INPUTS[example]()] if example in INPUTS else []
    return [
        f"--gin_file={ROOT}/examples/{example}.gin",
        f"--model_dir={model_dir}",
        *(f"--gin_param={param}" for param in (*SHORT, *every, *inputs, *params)),
        f"--mode={'train_and_eval' if evaluates else 'train'}",
    ]


def start(example, model_dir, *options):
    return forked.Popen(
        [sys.executable, "-m", "ddl.main", *flags(example, model_dir), *options], cwd=ROOT
    )


def run(example, model_dir, *options, params=()):
    forked.run(
        [sys.executable, "-m", "ddl.main", *flags(example, model_dir, *params), *options],
        cwd=ROOT,
        check=True,
    )


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    @functools.cache
    def trained(example):
        model_dir = tmp_path_factory.mktemp(example) / "run"
        run(example, model_dir, "--strategy=one_device")
        return model_dir

    return trained


def assert_close(model_dir, reference):
    ours, theirs = tensors(model_dir), tensors(reference)
    assert ours.keys() == theirs.keys()
    compared = 0
    for name, value in theirs.items():
        if getattr(value, "dtype", None) == np.float64 and not name.startswith("state/"):
            np.testing.assert_allclose(ours[name], value, rtol=0, atol=1e-10, err_msg=name)
            compared += 1
    assert compared > 4


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_header_gives_the_command(example):
    header = (ROOT / f"examples/{example}.gin").read_text().partition("\n#\n")[0].splitlines()
    assert all(line.startswith("# python -m ddl.main ") for line in header)
    assert f"--gin_file=examples/{example}.gin " in header[-1]
    assert header[-1].endswith(f"--model_dir=runs/{example}")


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES)
def test_the_same_on_any_devices(example, one_device, tmp_path):
    """On 2 and 4 replicas; with accumulation; on two workers. Slots and targets too.

    Batch normalization takes the moments of each microbatch, so an example with it is compared with
    another run with accumulation.
    """
    for options in (TWO, FOUR):
        model_dir = tmp_path / options[-1]
        run(example, model_dir, *options)
        assert_close(model_dir, one_device(example))
    accumulated = {"params": ["ACCUMULATION_STEPS = 2"]}
    run(example, tmp_path / "accumulated", "--strategy=one_device", **accumulated)
    if example in NORMALIZED:
        run(example, tmp_path / "accumulated on two", *TWO, **accumulated)
        assert_close(tmp_path / "accumulated on two", tmp_path / "accumulated")
    else:
        assert_close(tmp_path / "accumulated", one_device(example))
    status, output = finish(launch(2, *flags(example, tmp_path / "workers")))
    assert status == 0, output
    assert_close(tmp_path / "workers", one_device(example))


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES)
def test_killed_and_started_again_it_ends_the_same(example, tmp_path):
    run(example, tmp_path / "straight", *TWO)
    process = start(example, tmp_path / "killed", *TWO)
    saved = tmp_path / "killed" / "checkpoints" / "step-10.index"
    while process.poll() is None and not saved.exists():
        pass
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert saved.exists()
    run(example, tmp_path / "killed", *TWO)
    ours, theirs = tensors(tmp_path / "killed"), tensors(tmp_path / "straight")
    for name, value in theirs.items():
        np.testing.assert_array_equal(ours[name], value, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES)
def test_exports_what_was_trained(example, one_device):
    model_dir = one_device(example)
    forked.run(
        [
            *(sys.executable, "-m", "ddl.main", *flags(example, model_dir)[:-1]),
            *("--mode=export", "--strategy=one_device"),
        ],
        cwd=ROOT,
        check=True,
    )
    saved = [v for v in tensors(model_dir).values() if getattr(v, "dtype", None) == np.float64]
    exported = sorted((model_dir / "export").rglob("*.keras"))
    assert exported
    for path in exported:
        model = keras.models.load_model(path)
        for variable in model.trainable_variables:
            assert any(
                value.shape == variable.shape and np.array_equal(value, variable.numpy())
                for value in saved
            ), variable.path
        tf.saved_model.load(str(path.with_name("saved_model")))
