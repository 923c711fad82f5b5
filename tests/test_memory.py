"""A shorter form of benchmarks/memory.py: a run does not grow with its updates."""

import pytest

from benchmarks.memory import peaks


@pytest.mark.slow
def test_a_run_does_not_grow():
    plan = ("TRAIN_STEPS = 4000", "EVAL_EVERY = 100", "CHECKPOINT_EVERY = 50", "LOG_EVERY = 25")
    found = peaks((1000, 4000), plan)
    assert found[4000] < 1.05 * found[1000]
