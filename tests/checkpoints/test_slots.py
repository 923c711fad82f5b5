"""Checkpoints of sharded optimizers: the same as those of whole ones."""

import pytest

from ddl.checkpoints.checkpoints import Checkpoints
from ddl.precision import set_precision
from tests.conftest import make_strategy, save
from tests.step.sharding.trainers import assert_close, make, weights, whole_slots


def of(replicas, shards):
    set_precision("float64")
    return make(make_strategy("mirrored", replicas), shards)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Trainers after five updates, and the folder that holds them after the third one."""
    found = {}
    for replicas, shards in ((2, False), (2, True), (4, True)):
        folder = tmp_path_factory.mktemp(f"{replicas}-{shards}")
        trainer = of(replicas, shards)
        trainer.train(3, progress=False)
        save(folder, trainer)
        trainer.train(2, progress=False)
        found[replicas, shards] = trainer, folder, (weights(trainer), whole_slots(trainer))
    return found


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, False), (2, True)),
        ((2, True), (2, True)),
        ((2, True), (4, True)),
        ((4, True), (2, False)),
    ],
)
def test_a_run_resumes_with_the_switch_and_the_replicas_changed(trained, before, after):
    trainer, (own, slots) = trained[after][0], trained[before][2]
    Checkpoints(trained[before][1], trainer).restore_latest()
    trainer.train(2, progress=False)
    tolerance = 0 if before == after else 1e-12
    assert_close(weights(trainer)[:: after[0]], own[:: before[0]], atol=tolerance)
    assert_close(whole_slots(trainer), slots, atol=tolerance)
