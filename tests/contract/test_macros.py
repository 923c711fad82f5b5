"""What the macros of a config do, seen in the files of a run."""

import numpy as np
import pytest

from tests.contract.commands import FOUR_DEVICES, finished, lines, saved, saved_steps

SHORT = ("TRAIN_STEPS = 3", "EVAL_EVERY = None", "CHECKPOINT_EVERY = None", "LOG_EVERY = 1")


def rates(model_dir):
    return [line["learning_rate"] for line in lines(model_dir, "train")]


def test_the_rate_scales_with_a_batch_by_replica_and_warms_up(tmp_path):
    """4 replicas × 16 examples, four times the base: a rate of 0.2, after 4 updates from 0."""
    batch = ("GLOBAL_BATCH_SIZE = None", "PER_REPLICA_BATCH_SIZE = 16", "BASE_BATCH_SIZE = 16")
    rule = ("SCALING_RULE = 'linear'", "WARMUP_STEPS = 4", "TRAIN_STEPS = 6")
    run = finished(tmp_path / "run", *SHORT[1:], *batch, *rule, flags=FOUR_DEVICES)
    np.testing.assert_allclose(rates(run), [0, 0.05, 0.1, 0.15, 0.2, 0.2], rtol=1e-6)
    assert lines(run)[0]["epoch"] == pytest.approx(1 / 23, rel=1e-4)


def test_the_square_root_rule_and_a_warmup_in_epochs(tmp_path):
    """Of 23 batches, 3.91 are 4 updates; the rate begins at half of its peak."""
    rule = ("BASE_BATCH_SIZE = 16", "SCALING_RULE = 'square_root'", "WARMUP_START = 0.5")
    epochs = ("WARMUP_EPOCHS = 0.17", "TRAIN_STEPS = 6")
    run = finished(tmp_path / "run", *SHORT[1:], *rule, *epochs)
    peak = 0.05 * 2
    expected = [peak * share for share in (0.5, 0.625, 0.75, 0.875, 1, 1)]
    np.testing.assert_allclose(rates(run), expected, rtol=1e-6)


def test_a_length_in_epochs_counts_a_started_batch(tmp_path):
    """A quarter of 23 batches is 5.75. Without periods it saves and evaluates at the end."""
    run = finished(tmp_path / "run", *SHORT[1:], "TRAIN_STEPS = None", "TRAIN_EPOCHS = 0.25")
    assert [line["step"] for line in lines(run, "train")] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in lines(run, "eval")] == [6]
    assert saved_steps(run) == [6]


@pytest.mark.parametrize("precision", ["float64", "mixed_bfloat16"])
def test_precision_is_that_of_the_weights(tmp_path, precision):
    run = finished(tmp_path / "run", *SHORT, f"PRECISION = '{precision}'")
    kernels = [value for value in saved(run).values() if value.shape == (64, 16)]
    expected = "float64" if precision == "float64" else "float32"
    assert {value.dtype.name for value in kernels} == {expected}


def test_clip_norm_bounds_an_update(tmp_path):
    """The rate is 1, so that an update is the gradient, of norm 0.01 at most."""
    plain = ("SGD.momentum = 0.0", "LEARNING_RATE = 1.0", "CLIP_NORM = 0.01")
    run = finished(tmp_path / "run", *SHORT, *plain, "CHECKPOINT_EVERY = 1")
    before, after = saved(run, 1), saved(run, 2)
    weights = [name for name, value in before.items() if value.dtype == np.float32 and value.ndim]
    moved = sum(float(((after[name] - before[name]) ** 2).sum()) for name in weights)
    assert moved**0.5 == pytest.approx(0.01, rel=1e-4)


def test_the_seed_decides_about_the_run(tmp_path):
    one, other = (saved(finished(tmp_path / n, *SHORT, f"SEED = {n}")) for n in "56")
    kernels = [name for name, value in one.items() if value.shape == (64, 16)]
    assert kernels
    assert not any(np.array_equal(one[name], other[name]) for name in kernels)
