"""What the tests of losses across examples can find: one thing is broken at a time."""

import pytest
import tensorflow as tf

from ddl.errors import TrainingDiverged
from ddl.layers import replica_gather
from ddl.tasks import gather
from tests.tasks import test_across_examples

Patch = pytest.MonkeyPatch
pytestmark = pytest.mark.usefixtures("rows_checked_on_one_device")
gathered = gather.gather_over_replicas


def gather_in_another_order(patch: Patch) -> None:
    def mutated(values):
        halves = [tf.split(rows, 2) for rows in gathered(values)]
        return [tf.concat([second, first], axis=0) for first, second in halves]

    patch.setattr(gather, "gather_over_replicas", mutated)


def leave_out_the_gradient(patch: Patch) -> None:
    patch.setattr(
        gather,
        "gather_over_replicas",
        lambda values: [tf.stop_gradient(rows) for rows in gathered(values)],
    )


def keep_the_own_gradient(patch: Patch) -> None:
    def mutated(values):
        rows = values.shape[0] // 2
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        own = values[replica * rows : (replica + 1) * rows]
        return tf.ensure_shape(own, [rows, *values.shape[1:]])

    patch.setattr(replica_gather, "_own_sums", mutated)


def count_padding(patch: Patch) -> None:
    over_replicas = gather._over_replicas

    def mutated(*arguments):
        result = over_replicas(*arguments)
        return result._replace(mask=tf.ones_like(result.mask))

    patch.setattr(gather, "_over_replicas", mutated)


def same(name: str) -> None:
    test_across_examples.check_same(name, "mirrored", 2)


def loop(name: str) -> None:
    test_across_examples.check_loop(name, "mirrored", 2)


@pytest.mark.parametrize(
    ("mutate", "check", "case"),
    [
        (gather_in_another_order, same, "InfoNce"),
        (leave_out_the_gradient, same, "InfoNce"),
        (keep_the_own_gradient, same, "InfoNce"),
        (count_padding, loop, "InfoNce"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_test_fails_with(mutate, check, case, monkeypatch):
    if check is same:
        test_across_examples.on_one_device(case)  # of the unchanged code
    mutate(monkeypatch)
    with pytest.raises((AssertionError, TrainingDiverged)):
        check(case)
