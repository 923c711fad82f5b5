"""Each file of examples/: the same on any devices, killed and resumed, exported.

Most runs are made in this process, where TensorFlow is loaded: tracing takes nearly all their time.
The runs on two workers and those that are killed are started as a user starts them.
"""

import functools
import sys
import tempfile
import time
import zlib
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl import config
from ddl.choices import Mode
from ddl.distribution.communication import Communication
from ddl.distribution.workers import Workers
from ddl.run import train
from tests.conftest import make_strategy
from tests.distribution.whole_clusters import finish, launch
from tests.processes import forked
from tests.processes.stopping import stop_when
from tests.run.whole_runs import ROOT, SMALL, lines, tensors

EXAMPLES = sorted(
    path.stem for path in (ROOT / "examples").glob("*.py") if path.with_suffix(".gin").exists()
)
SHORT = ("TRAIN_STEPS = 20", "LOG_EVERY = 10", "CHECKPOINT_EVERY = 10", "PRECISION = 'float64'")
ONE, TWO, FOUR = ("one_device", 1), ("mirrored", 2), ("mirrored", 4)
ACCUMULATED = "ACCUMULATION_STEPS = 2"

_INPUTS = tempfile.TemporaryDirectory(prefix="ddl-examples-")


def run(file, params, model_dir, strategy=ONE, mode: Mode = "train"):
    """Makes a run of `ddl.main` in this process."""
    keras.utils.clear_session()  # names as in a new process
    config.load([f"{ROOT}/{file}"], list(params))
    placement = train.Placement(make_strategy(*strategy), Communication())
    train.run(placement, str(model_dir), mode=mode)


@functools.cache
def trained_before(file: str) -> Path:
    """Returns the model directory of a config that was trained for a few steps, and its export."""
    model_dir = Path(_INPUTS.name) / Path(file).stem
    for mode in ("train", "export"):
        run(file, (*SHORT, *SMALL, "EVAL_EVERY = None"), model_dir, mode=mode)
    return model_dir


def teacher() -> str:
    """Returns the parameter with the exported teacher of the distillation."""
    model_dir = trained_before("configs/digits_cnn.gin")
    return f"Distillation.teacher = '{model_dir}/export/model.keras'"


def pretrained() -> str:
    """Returns the parameter with the run whose layers are fine-tuned."""
    return f"WarmStart.checkpoint = '{trained_before('configs/digits_cnn.gin')}'"


# The exported models of the examples that have other ones than `model`.
EXPORTED = {
    "byol": ["encoder"],
    "clip": ["left", "right"],
    "gan": ["generator", "discriminator"],
    "simclr": ["encoder"],
    "vae": ["encoder", "decoder"],
    "vicreg": ["encoder"],
    "wgan_gp": ["generator", "critic"],
}
NORMALIZED = {"byol"}  # examples with batch normalization
READ_IN_A_MINUTE = 100  # lines
# Parameters of the examples that read the result of another run.
INPUTS = {"distillation": teacher, "fine_tuning": pretrained}
PARAMS = {
    # The backbone thaws after the checkpoint from which a run resumes.
    "fine_tuning": ["backbone/Group.frozen_until = 12"],
    # The 20 updates reach the partial batch at the end of an epoch.
    "triplets": ["GLOBAL_BATCH_SIZE = 128"],
    "u_net": ["train/shapes.n = 500"],
    "rare_class": ["train/points.n = 1990"],
}

# Figures of their evaluations that are compared on two workers.
FIGURES = {"u_net": ["mean_iou"], "rare_class": ["auc", "pr_auc", "auc_by_ranks"]}


def text_of(example) -> str:
    return (ROOT / f"examples/{example}.gin").read_text()


def evaluates(example) -> bool:
    evaluated = ("Trainer.eval_data", "include 'digits", "include 'from_scratch")
    return any(text in text_of(example) for text in evaluated)


def params(example) -> list[str]:
    every = ["EVAL_EVERY = 10"] if evaluates(example) else []
    convolves = any(f"include '{name}" in text_of(example) for name in ("digits_cnn", "from_"))
    inputs = [INPUTS[example]()] if example in INPUTS else []
    return [*SHORT, *every, *(SMALL if convolves else ()), *inputs, *PARAMS.get(example, ())]


def flags(example, model_dir):
    return [
        f"--gin_file={ROOT}/examples/{example}.gin",
        f"--model_dir={model_dir}",
        *(f"--gin_param={param}" for param in params(example)),
        f"--mode={'train_and_eval' if evaluates(example) else 'train'}",
    ]


def run_example(example, model_dir, strategy, *more, mode: Mode = "train"):
    run(f"examples/{example}.gin", (*params(example), *more), model_dir, strategy, mode)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A function that returns the model directory of a whole run of an example."""

    @functools.cache
    def trained(example, *more):
        model_dir = tmp_path_factory.mktemp(example) / "run"
        mode = "train_and_eval" if evaluates(example) else "train"
        run_example(example, model_dir, ONE, *more, mode=mode)
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


def assert_same_figures(model_dir, reference, split, names=None):
    """Compares two lines of figures; None: losses, metrics, norms and learning rates, all."""
    ours, theirs = (
        [
            {name: one[name] for name in ("step", *(names or one))}
            for one in lines(folder)
            if one.pop("split") == split
        ]
        for folder in (model_dir, reference)
    )
    assert len(theirs) == 2
    for our, their in zip(ours, theirs, strict=True):
        assert our == pytest.approx(their, rel=0, abs=1e-10)


def assert_equal(model_dir, reference):
    ours, theirs = tensors(model_dir), tensors(reference)
    assert ours.keys() == theirs.keys()
    assert int(theirs["state/step/.ATTRIBUTES/VARIABLE_VALUE"]) == 20
    for name, value in theirs.items():
        np.testing.assert_array_equal(ours[name], value, err_msg=name)


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_header_gives_the_command(example):
    header = text_of(example).partition("\n#\n")[0].splitlines()
    assert all(line.startswith("# python -m ddl.main ") for line in header)
    assert f"--gin_file=examples/{example}.gin " in header[-1]
    assert header[-1].endswith(f"--model_dir=runs/{example}")


@pytest.mark.parametrize("example", EXAMPLES)
def test_it_is_read_in_a_minute(example):
    text = (ROOT / f"examples/{example}.py").read_text()
    assert len([line for line in text.splitlines() if line.strip()]) <= READ_IN_A_MINUTE


def whole_or_accumulated(example, trained):
    """Returns the run on one device that a run with two microbatches equals.

    Batch normalization takes the moments of each microbatch.
    """
    return trained(example, ACCUMULATED) if example in NORMALIZED else trained(example)


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES)
@pytest.mark.parametrize("replicas", [TWO, FOUR], ids=["two", "four"])
def test_the_same_on_replicas(example, replicas, trained, tmp_path):
    """Slots, targets and own variables too."""
    run_example(example, tmp_path / "run", replicas)
    assert_close(tmp_path / "run", trained(example))
    assert_same_figures(tmp_path / "run", trained(example), "train")


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES)
def test_the_same_with_accumulation_on_two_replicas(example, trained, tmp_path):
    run_example(example, tmp_path / "run", TWO, ACCUMULATED)
    assert_close(tmp_path / "run", whole_or_accumulated(example, trained))


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES)
def test_two_workers_compute_the_same(example, trained, tmp_path):
    status, output = finish(launch(2, *flags(example, tmp_path / "workers")), timeout=300)
    assert status == 0, output
    assert_close(tmp_path / "workers", trained(example))
    assert_same_figures(tmp_path / "workers", trained(example), "train")
    if example in FIGURES:
        assert_same_figures(tmp_path / "workers", trained(example), "eval", FIGURES[example])


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES)
def test_killed_and_resumed_it_ends_the_same(example, trained, tmp_path):
    """Killed by SIGKILL at a random moment after a checkpoint, and resumed in this process."""
    model_dir = tmp_path / "killed"
    command = [sys.executable, "-m", "ddl.main", *flags(example, model_dir)]
    process = forked.Popen([*command, "--strategy=one_device"], cwd=ROOT)
    random = np.random.default_rng(zlib.crc32(example.encode()))
    checkpoints = model_dir / "checkpoints"

    def moment():
        while process.poll() is None and not (checkpoints / "step-10.index").exists():
            time.sleep(0.0005)
        time.sleep(random.uniform(0, 0.005))

    try:
        assert stop_when(process.pid, (checkpoints / "step-10.index").exists, moment)
    finally:
        process.kill()
        process.wait()
    for file in checkpoints.glob("step-20.*"):  # it was faster than this process
        if (
            not file.is_dir()
        ):  # a folder is an unfinished checkpoint, which the resumed run meets as it is
            file.unlink()
    run_example(example, model_dir, ONE)
    assert_equal(model_dir, trained(example))


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES)
def test_exports_each_model_that_computes_what_was_trained(example, trained):
    """As a .keras file and as a SavedModel, beside the models of a trainer that was restored."""
    model_dir = trained(example)
    run_example(example, model_dir, ONE, mode="export")
    folder = model_dir / "export"
    names = EXPORTED.get(example, ["."])
    paths = sorted(folder.rglob("model.keras"))
    assert paths == sorted(folder / name / "model.keras" for name in names)
    task = restored(example, model_dir).task
    for name in names:
        model = getattr(task, "exported_models", vars(task))[name if name != "." else "model"]
        inputs = tf.constant(np.random.default_rng(0).normal(size=(3, *model.input_shape[1:])))
        expected = keras.tree.flatten(model(inputs, training=False))
        assert all(np.ptp(output, axis=0).any() for output in expected)  # it depends on its inputs
        loaded = keras.models.load_model(folder / name / "model.keras")
        served = tf.saved_model.load(str(folder / name / "saved_model"))
        for compute in (loaded, served.serve):
            for ours, theirs in zip(keras.tree.flatten(compute(inputs)), expected, strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12, err_msg=name)


def restored(example, model_dir) -> ddl.Trainer:
    """Returns a trainer of the example with other weights, which a checkpoint replaces."""
    keras.utils.clear_session()
    config.load([f"{ROOT}/examples/{example}.gin"], [*params(example), "SEED = 1"])
    strategy = make_strategy(*ONE)
    trainer = train.build(train.Placement(strategy, Communication()), Workers(strategy))[1]
    ddl.Checkpoints(model_dir / "checkpoints", trainer).restore_model()
    return trainer
