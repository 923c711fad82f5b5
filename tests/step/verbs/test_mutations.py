"""What the tests of the verbs can find: one thing is broken at a time, and a test must fail."""

import dataclasses
from collections.abc import Callable, Sequence

import pytest
import tensorflow as tf

from ddl import microbatch
from ddl.step.all_reduce import AllReduce
from ddl.step.global_gradient import GlobalGradient
from ddl.step.gradients import multiply
from ddl.step.overflow import KeptValues
from ddl.step.verbs import applying, changes
from ddl.step.verbs import update as verbs
from ddl.step.verbs.plan import StepPlan
from tests.step.verbs import test_applying, test_each_example, test_update

Patch = pytest.MonkeyPatch
pytestmark = pytest.mark.usefixtures("rows_checked_on_one_device")
examples_as_a_loop = test_each_example.test_what_a_loop_over_the_examples_computes
groups_as_a_loop = test_applying.test_groups_are_what_a_loop_without_ddl_computes


def leave_out_the_reduce(patch: Patch) -> None:
    patch.setattr(AllReduce, "__call__", lambda _, gradients, variables: list(gradients))


def reduce_twice(patch: Patch) -> None:
    reduce = AllReduce.__call__

    def mutated(self, gradients, variables):
        return reduce(self, reduce(self, gradients, variables), variables)

    patch.setattr(AllReduce, "__call__", mutated)


def divide_once_more(patch: Patch) -> None:
    multiplied = GlobalGradient._multiplied

    def mutated(self, gradients, factor):
        values, finite = multiplied(self, gradients, factor)
        return multiplied(self, values, lambda: tf.constant(0.5))[0], finite

    patch.setattr(GlobalGradient, "_multiplied", mutated)


def average_once_a_replica(patch: Patch) -> None:
    move = changes._move

    def mutated(variable, source, share):
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        for _ in range(replicas):
            moved = move(variable, source, share)
        return moved

    patch.setattr(changes, "_move", mutated)


def leave_a_partial_update_behind(patch: Patch) -> None:
    patch.setattr(KeptValues, "restore", lambda _: None)


def keep_no_weights(patch: Patch) -> None:
    patch.setattr(StepPlan, "to_restore", lambda self, optimizers: list(self.own))


def keep_no_own_variables(patch: Patch) -> None:
    keep_without(patch, lambda plan: plan.own)


def keep_no_targets(patch: Patch) -> None:
    keep_without(patch, lambda plan: plan.averaged)


def keep_without(patch: Patch, forgotten: Callable[[StepPlan], Sequence[tf.Variable]]) -> None:
    to_restore = StepPlan.to_restore

    def mutated(self, optimizers):
        ids = set(map(id, forgotten(self)))
        return [v for v in to_restore(self, optimizers) if id(v) not in ids]

    patch.setattr(StepPlan, "to_restore", mutated)


def check_only_the_last_gradient(patch: Patch) -> None:
    gradients = verbs.Update.gradients

    def mutated(self, *args, **kwargs):
        self.books.finite = None
        return gradients(self, *args, **kwargs)

    patch.setattr(verbs.Update, "gradients", mutated)
    patch.setattr("ddl.step.update._Work.finite", lambda self, gradients: None)


def sum_over_the_replicas_in_apply(patch: Patch) -> None:
    apply = applying.apply

    def mutated(strategy, gradients, *rest):
        replicas = tf.constant(strategy.num_replicas_in_sync, tf.float64)
        return apply(strategy, strategy.run(multiply, args=(gradients, replicas)), *rest)

    patch.setattr("ddl.step.update.apply", mutated)


def clip_each_group_by_itself(patch: Patch) -> None:
    apply = applying.apply

    def mutated(strategy, gradients, variables, parts, *rest):
        for part in parts:
            alone = dataclasses.replace(part, places=range(len(part.places)))
            own = [[values[place] for place in part.places] for values in (gradients, variables)]
            norm = apply(strategy, *own, [alone], *rest)
        return norm

    patch.setattr("ddl.step.update.apply", mutated)


def never_freeze(patch: Patch) -> None:
    patch.setattr(applying, "_unless_frozen", lambda part, step, update: update())


def leave_out_the_reduce_of_a_mean(patch: Patch) -> None:
    sums = GlobalGradient.sums

    def mutated(self, *args):
        own = self.strategy.experimental_local_results
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(self.strategy, "reduce", lambda op, value, axis: own(value)[0])
            return sums(self, *args)

    patch.setattr(GlobalGradient, "sums", mutated)


def draw_by_replica_in_a_map(patch: Patch) -> None:
    def mutated(strategy, function, args):
        current = microbatch.current()

        def run(*own):
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            copy = current.copied()
            copy.counter += tf.cast(tf.stack([replica, 0]), tf.uint64)
            with copy.forward():
                return function(*own)

        return strategy.run(run, args=args)

    patch.setattr("ddl.step.verbs.gradients.same_on_replicas", mutated)


def change_the_sum_of_examples(patch: Patch) -> None:
    def mutated(tape, losses, mask, variables, each, scale, divisor):
        share = tf.ones_like(losses) / divisor
        gradients = tape.gradient(losses, variables, share)
        return each([tf.convert_to_tensor(gradient) for gradient in gradients])

    patch.setattr("ddl.step.global_gradient.sum_of_changed", mutated)


def same(name: str) -> None:
    test_update.check_same(name, "mirrored", 2)


def overflow(name: str, loss: str) -> None:
    test_update.check_that_an_overflow_changes_nothing(name, loss)


@pytest.mark.parametrize(
    ("mutate", "check", "case"),
    [
        (leave_out_the_reduce, same, ["Gan"]),
        (reduce_twice, same, ["Gan"]),
        (sum_over_the_replicas_in_apply, same, ["Surgery"]),
        (average_once_a_replica, same, ["Byol"]),
        (divide_once_more, test_update.test_a_gan_is_what_a_loop_without_ddl_computes, []),
        (divide_once_more, test_update.test_sam_is_what_a_loop_without_ddl_computes, []),
        (leave_a_partial_update_behind, overflow, ["Gan", "fools"]),
        (keep_no_weights, overflow, ["Gan", "fools"]),
        (keep_no_targets, overflow, ["Critic", "fools"]),
        (keep_no_own_variables, overflow, ["Critic", "fools"]),
        (check_only_the_last_gradient, overflow, ["Surgery", "classifies"]),
        (leave_a_partial_update_behind, same, ["Sam"]),  # `moved` restores copies
        (
            clip_each_group_by_itself,
            groups_as_a_loop,
            [],
        ),
        (never_freeze, groups_as_a_loop, []),
        (leave_out_the_reduce_of_a_mean, same, ["Centered"]),
        (draw_by_replica_in_a_map, same, ["Private"]),
        (change_the_sum_of_examples, examples_as_a_loop, [("mirrored", 2, 1)]),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_test_fails_with(mutate, check, case, monkeypatch):
    if check is same:
        test_update.on_one_device(*case)  # of the unchanged code
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        check(*case)
