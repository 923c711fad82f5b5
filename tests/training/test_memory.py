"""A shorter form of benchmarks/memory.py: a run does not grow with its updates."""

import pytest

from benchmarks.memory import memory_of_run
from tests.run.whole_runs import SMALL


@pytest.mark.slow
def test_a_run_does_not_grow():
    plan = (
        *SMALL,
        "TRAIN_STEPS = 4000",
        "EVAL_EVERY = 100",
        "CHECKPOINT_EVERY = 50",
        "LOG_EVERY = 25",
    )
    found = memory_of_run((1000, 4000), plan)
    for kind in ("peak", "present"):
        assert found[4000][kind] < 1.05 * found[1000][kind]
