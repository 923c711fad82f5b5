"""Each file of examples/, as a user starts it: on any devices, killed, evaluated and exported."""

import functools
import signal
import sys

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


def flags(example, model_dir, *params):
    evaluates = "Trainer.eval_data" in (ROOT / f"examples/{example}.gin").read_text() or (
        "include 'digits" in (ROOT / f"examples/{example}.gin").read_text()
    )
    every = ["EVAL_EVERY = 10"] if evaluates else []
    return [
        f"--gin_file={ROOT}/examples/{example}.gin",
        f"--model_dir={model_dir}",
        *(f"--gin_param={param}" for param in (*SHORT, *every, *params)),
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


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES)
def test_the_same_on_any_devices(example, one_device, tmp_path):
    """On 2 and 4 replicas; with accumulation; on two workers. Slots and targets too."""
    for options in (TWO, FOUR):
        model_dir = tmp_path / options[-1]
        run(example, model_dir, *options)
        assert_close(model_dir, one_device(example))
    run(
        example,
        tmp_path / "accumulated",
        "--strategy=one_device",
        params=["ACCUMULATION_STEPS = 2"],
    )
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
