"""What the tests of losses across examples can find: one thing is broken at a time."""

import pytest
import tensorflow as tf

from ddl.errors import TrainingDiverged
from ddl.layers import replica_gather
from ddl.step.across_examples.passes import ThreePasses
from ddl.step.overflow import KeptValues
from ddl.tasks import gather
from tests.step.across_examples import test_passes, test_same

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


def count_padding_in_passes(patch: Patch) -> None:
    of_all = ThreePasses._of_all

    def mutated(self, own):
        *rows, mask = of_all(self, own)
        return [*rows, tf.ones_like(mask)]

    patch.setattr(ThreePasses, "_of_all", mutated)


def mix_up_microbatches(patch: Patch) -> None:
    patch.setattr(ThreePasses, "_swapped", lambda self, rows, first: rows)


def leave_out_the_third_pass(patch: Patch) -> None:
    pulled = ThreePasses._pulled

    def mutated(self, batch, index, given):
        return [tf.zeros_like(gradient) for gradient in pulled(self, batch, index, given)]

    patch.setattr(ThreePasses, "_pulled", mutated)


def draw_anew_in_each_pass(patch: Patch) -> None:
    over_microbatches = ThreePasses._over_microbatches

    def mutated(self, *arguments):
        self.draws = self.draws._replace(number=self.draws.number + 1)
        return over_microbatches(self, *arguments)

    patch.setattr(ThreePasses, "_over_microbatches", mutated)


def move_statistics_in_each_pass(patch: Patch) -> None:
    patch.setattr(KeptValues, "restore", lambda _: None)


def same(name: str, accumulation_steps: int) -> None:
    test_same.check_same(name, "mirrored", 2, accumulation_steps)


def loop(name: str, accumulation_steps: int) -> None:
    test_same.check_loop(name, "mirrored", 2, accumulation_steps)


@pytest.mark.parametrize(
    ("mutate", "check", "case"),
    [
        (gather_in_another_order, same, ["InfoNce", 1]),
        (leave_out_the_gradient, same, ["InfoNce", 1]),
        (keep_the_own_gradient, same, ["InfoNce", 1]),
        (keep_the_own_gradient, same, ["Triplets", 2]),
        (count_padding, loop, ["InfoNce", 1]),
        (count_padding_in_passes, loop, ["InfoNce", 2]),
        (mix_up_microbatches, same, ["InfoNce", 2]),
        (leave_out_the_third_pass, same, ["InfoNce", 2]),
        (draw_anew_in_each_pass, same, ["InfoNce", 2]),
        (move_statistics_in_each_pass, test_passes.check_statistics, []),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_test_fails_with(mutate, check, case, monkeypatch):
    if check is same:
        test_same.on_one_device(case[0])  # of the unchanged code
    for task in (test_passes.OwnRows, test_passes.EachAlone):
        monkeypatch.setitem(test_passes.TASKS, task.__name__, task)
    mutate(monkeypatch)
    with pytest.raises((AssertionError, TrainingDiverged)):
        check(*case)
