"""Replays in this process, against the runs that they repeat."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from ddl.errors import ConfigError, ModelDirectoryError
from ddl.replay.devices import placed
from ddl.replay.folder import read_run
from ddl.replay.processes import ask
from ddl.replay.replaying import check_no_rewind, replay_with
from ddl.replay.values import SHOWN, arrays_of, tables
from tests.replay.in_process import Direct, train_run

GIN = Path(__file__).parents[1] / "bisect" / "faulty.gin"
KERNEL = "optimizer/_trainable_variables/0/.ATTRIBUTES/VARIABLE_VALUE"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    train_run(GIN, folder / "run", "CHECKPOINT_EVERY = 1", "Retention.last = 40")
    return folder / "run"


@pytest.fixture(scope="module")
def players(trained, tmp_path_factory):
    """An exact player and one that records, of a copy with few checkpoints."""
    folder = tmp_path_factory.mktemp("players")
    few = folder / "run"
    shutil.copytree(trained, few)
    for file in (few / "checkpoints").iterdir():
        if file.name.split(".")[0] not in ("step-6", "step-12", "step-24"):
            file.unlink()
    exact = Direct(few, folder / "exact")
    exact.replayer.begin(0)
    return few, exact, Direct(few, folder / "detailed", in_detail=True)


def kernel(run, step):
    """The weights of the first layer in a checkpoint."""
    reader = tf.train.load_checkpoint(str(run / "checkpoints" / f"step-{step}"))
    return reader.get_tensor(KERNEL)


def listing(path):
    return {file: file.stat().st_mtime_ns for file in path.rglob("*")}


@pytest.mark.parametrize(("step", "began"), [(3, 0), (12, 6), (13, 12)])
def test_an_update_is_computed_again(trained, players, step, began):
    """From the initial weights, to the step of a checkpoint, right after one."""
    few, exact, detailed = players
    before = listing(few)
    made = replay_with(read_run(few), step, exact, detailed)
    assert made.began == began
    assert listing(few) == before
    repeats = "ends at the bits of its checkpoint step-12" in made.verdict
    assert repeats == (step == 12)
    found = arrays_of(made.recorded, step, list(SHOWN))
    assert len(found["indices"]) == len(found["rows/x"]) == 32
    change = kernel(trained, step) - kernel(trained, step - 1)
    np.testing.assert_allclose(
        found["update/weights/sequential/first/kernel"], change, rtol=1e-6, atol=1e-8
    )
    own = [
        value
        for name, value in found.items()
        if name.startswith("own gradients/sequential/last/bias")
    ]
    assert len(own) == 4
    np.testing.assert_allclose(
        sum(own), found["gradients/sequential/last/bias"], rtol=1e-4, atol=1e-6
    )


def test_the_rows_are_those_of_the_indices(players):
    from tests.bisect.faulty import Points

    few, exact, detailed = players
    made = replay_with(read_run(few), 7, exact, detailed, verify=True)
    assert "ends at the bits of its checkpoint step-12" in made.verdict
    found = arrays_of(made.recorded, 7, ["indices", "examples"])
    expected = Points().gather(tf.constant(found["indices"]))
    np.testing.assert_array_equal(found["rows/x"], expected["x"].numpy())
    text = "\n".join(tables(made.recorded, 7, list(SHOWN)))
    for word in ("indices of the 32 rows", "outputs of layers", "noisy", "change of the slots"):
        assert word in text
    assert not list(tables(made.recorded, 7, []))


def test_code_that_has_changed_is_told(players, trained, tmp_path):
    """The checkpoint of the step is that of another run."""
    few, exact, detailed = players
    other = tmp_path / "run"
    shutil.copytree(few, other)
    for ending in ("index", "data-00000-of-00001", "json"):
        shutil.copy(
            trained / "checkpoints" / f"step-11.{ending}",
            other / "checkpoints" / f"step-12.{ending}",
        )
    saved = exact.replayer._saved
    exact.replayer._saved = type(saved)(other / "checkpoints")
    try:
        made = replay_with(read_run(other), 12, exact, detailed)
    finally:
        exact.replayer._saved = saved
    assert "THE REPLAY DOES NOT REPEAT" in made.verdict


def test_a_damaged_checkpoint_is_left_out(players, tmp_path):
    few, exact, _ = players
    other = tmp_path / "run"
    shutil.copytree(few, other)
    (other / "checkpoints" / "step-12.data-00000-of-00001").write_bytes(b"damaged")
    before = listing(other)
    saved = exact.replayer._saved
    exact.replayer._saved = type(saved)(other / "checkpoints")
    try:
        begun = ask(exact, "begin", step=15)
        with pytest.raises(ModelDirectoryError, match="step-12 is damaged"):
            ask(exact, "saved", step=12)
    finally:
        exact.replayer._saved = saved
    assert begun["step"] == 6
    assert "step-12 is damaged" in begun["notes"][0]
    assert listing(other) == before


def test_a_rewind_is_refused(players):
    run = read_run(players[0])
    check_no_rewind(run, 6, 1, 12, 1)
    with pytest.raises(ConfigError, match="rewound between step 6 and its checkpoint of step 12"):
        check_no_rewind(run, 6, 0, 12, 1)


def test_checkpoints_name_strategy_and_device(trained):
    found = json.loads((trained / "checkpoints" / "step-6.json").read_text())
    assert (found["strategy"], found["replicas"], found["device"]) == ("mirrored", 2, "CPU")
    assert (found["shard_optimizer_state"], found["jit_compile"]) == (False, "auto")
    assert found["tf32"] in (True, False)


def test_a_run_with_slots_in_shares_is_replayed(tmp_path):
    sharded = {"shard_optimizer_state": True, "shard_gradients": True}
    optimizer = ("FusedSGD.learning_rate = 0.05", "FusedSGD.momentum = 0.9")
    params = ("TRAIN_STEPS = 4", "CHECKPOINT_EVERY = 4", "Trainer.optimizer = @FusedSGD()")
    average = (
        *("ACCUMULATION_STEPS = 2", "Trainer.weight_average = @ExponentialMovingAverage()"),
        "ExponentialMovingAverage.decay = 0.9",
    )
    train_run(GIN, tmp_path / "run", *params, *optimizer, *average, **sharded)
    run = read_run(tmp_path / "run")
    assert run.checkpoints[4]["shard_optimizer_state"] is True
    assert run.checkpoints[4]["shard_gradients"] is True
    assert {"--shard_optimizer_state", "--shard_gradients"} <= {*placed(run, 3, [], {}).flags}
    exact = Direct(run.path, tmp_path / "exact", **sharded)
    detailed = Direct(run.path, tmp_path / "detailed", in_detail=True, **sharded)
    made = replay_with(run, 4, exact, detailed)
    assert "ends at the bits of its checkpoint step-4" in made.verdict
    found = arrays_of(made.recorded, 4, list(SHOWN))
    for name in ("gradients", "applied gradients", "clipped gradients", "update/weights"):
        assert found[f"{name}/sequential/first/kernel"].shape == (6, 8)
    (slot,) = (name for name in found if "slots" in name and "first_kernel" in name)
    assert found[slot].shape == (6, 8)  # whole
    averages = [found[name].shape for name in found if "averages" in name and "first" in name]
    assert (6, 8) in averages
    assert np.any(found[slot] != 0)
