import pytest

from ddl.checkpoints.directory import Metadata, Retention, SavedCheckpoint
from ddl.errors import ConfigError


def saved(*steps, **accuracies):
    """Checkpoints of these steps; s5=0.9 gives that of step 5 an accuracy."""
    return [
        SavedCheckpoint(
            step,
            f"step-{step}",
            Metadata({"accuracy": accuracies[f"s{step}"]} if f"s{step}" in accuracies else {}),
        )
        for step in steps
    ]


def steps(checkpoints):
    return [each.step for each in checkpoints]


def test_the_last_stay():
    assert steps(Retention(last=2).removable(saved(1, 2, 3, 4))) == [1, 2]
    assert Retention(last=3).removable(saved(1, 2)) == []


def test_every_so_many_steps_one_stays_for_good():
    assert steps(Retention(last=1, every=20).removable(saved(10, 20, 30, 40, 50))) == [10, 30]


def test_the_best_stays():
    there = saved(1, 2, 3, 4, s1=0.5, s2=0.9, s3=0.7)
    retention = Retention(last=1, best_metric="accuracy")
    assert retention.best(there).step == 2
    assert steps(retention.removable(there)) == [1, 3]
    assert Retention(last=1, best_metric="accuracy", best_mode="min").best(there).step == 1
    assert Retention(best_metric="loss").best(there) is None
    assert Retention().best(there) is None


def test_a_mode_needs_a_metric():
    with pytest.raises(ConfigError, match="of 'loss' must be 'min', got 'max'"):
        Retention(best_metric="loss", best_mode="max")
    with pytest.raises(ConfigError, match="must be 'max' or 'min', got 'best'"):
        Retention(best_metric="accuracy", best_mode="best")
