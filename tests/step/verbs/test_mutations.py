"""What the tests of the verbs can find: one thing is broken at a time, and a test must fail."""

import dataclasses
from collections.abc import Callable, Sequence

import pytest
import tensorflow as tf

from ddl import microbatch
from ddl.data import BatchPipeline
from ddl.microbatch import Microbatch
from ddl.step.all_reduce import AllReduce
from ddl.step.global_gradient import GlobalGradient
from ddl.step.gradients import multiply
from ddl.step.overflow import KeptValues
from ddl.step.verbs import applying, changes
from ddl.step.verbs import update as verbs
from ddl.step.verbs.batches import StepBatch, StepBatches
from ddl.step.verbs.control_flow import ControlFlow
from ddl.step.verbs.plan import StepPlan
from tests.step.verbs import (
    test_applying,
    test_batches,
    test_draws,
    test_each_example,
    test_mean,
    test_update,
)

Patch = pytest.MonkeyPatch
pytestmark = pytest.mark.usefixtures("rows_checked_on_one_device")
examples_as_a_loop = test_each_example.test_what_a_loop_over_the_examples_computes
groups_as_a_loop = test_applying.test_groups_are_what_a_loop_without_ddl_computes
batches_in_order = test_batches.test_each_update_reads_the_next_batches_in_order
of_a_padded_batch = test_mean.test_of_a_full_and_of_a_padded_batch
draws_again = test_update.test_each_pass_draws_anew_unless_told_to_draw_the_same
mean_draws_again = test_update.test_a_mean_may_draw_what_a_pass_drew
moves_statistics = test_update.test_each_pass_moves_statistics_unless_told_otherwise
later_draws_differ = test_draws.test_a_map_draws_the_same_on_all_replicas_and_later_draws_differ


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
    patch.setattr(applying, "unless_frozen", lambda part, step, update: update())


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


def run_a_branch_always(patch: Patch) -> None:
    patch.setattr("ddl.step.verbs.control_flow._condition", lambda given: tf.constant(True))


def lose_the_sums_of_a_branch(patch: Patch) -> None:
    when = ControlFlow.when

    def mutated(self, *args):
        before = self.books
        when(self, *args)
        finite, self.books = self.books.finite, before
        self.books.finite = finite

    patch.setattr(ControlFlow, "when", mutated)


def lose_the_checks_of_a_branch(patch: Patch) -> None:
    when = ControlFlow.when

    def mutated(self, *args):
        before = self.books.finite
        when(self, *args)
        self.books.finite = before

    patch.setattr(ControlFlow, "when", mutated)


def draw_anew_when_told_to_draw_the_same(patch: Patch) -> None:
    draws_of = verbs.Update._draws_of
    patch.setattr(verbs.Update, "_draws_of", lambda self, earlier: draws_of(self, None))


def draw_the_same_in_each_pass(patch: Patch) -> None:
    patch.setattr(verbs.Update, "_draws_of", lambda self, earlier: 0)


def draw_after_a_map_what_it_drew(patch: Patch) -> None:
    patch.setattr(Microbatch, "advance_to", lambda self, other: None)


def move_the_statistics_in_each_pass(patch: Patch) -> None:
    statistics = verbs.Update._statistics
    patch.setattr(verbs.Update, "_statistics", lambda self, move: statistics(self, True))


def use_the_given_batch_again(patch: Patch) -> None:
    further = StepBatches.next

    def mutated(self, batch, is_in_branch):
        taken = further(self, batch, is_in_branch)
        return StepBatch(taken.source, 0, taken.batch)

    patch.setattr(StepBatches, "next", mutated)


def use_batches_again_after_a_restart(patch: Patch) -> None:
    iterator = BatchPipeline.iterator

    def mutated(self, strategy, first_update, **arguments):
        return iterator(self, strategy, max(first_update - 1, 0), **arguments)

    patch.setattr(BatchPipeline, "iterator", mutated)


def reduce_sums_twice(patch: Patch) -> None:
    of_sums = AllReduce.of_sums

    def mutated(self, sums):
        once = of_sums(self, sums)
        return of_sums(self, self._strategy.run(tf.identity, args=(once,)))

    patch.setattr(AllReduce, "of_sums", mutated)


def divide_a_sum(patch: Patch) -> None:
    patch.setattr(verbs.Update, "sum", verbs.Update.mean)


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
        # update.when
        (run_a_branch_always, same, ["Critic"]),
        (lose_the_sums_of_a_branch, same, ["Critic"]),
        (lose_the_checks_of_a_branch, overflow, ["Critic", "fools"]),
        (keep_no_weights, overflow, ["Critic", "fools"]),
        (leave_a_partial_update_behind, overflow, ["Critic", "fools"]),
        # update.next
        (use_the_given_batch_again, batches_in_order, []),
        (use_batches_again_after_a_restart, batches_in_order, []),
        # update.mean and update.sum
        (leave_out_the_reduce_of_a_mean, of_a_padded_batch, [("mirrored", 2, 1)]),
        (reduce_sums_twice, of_a_padded_batch, [("mirrored", 2, 1)]),
        (divide_a_sum, of_a_padded_batch, [("mirrored", 2, 1)]),
        # same_draws_as, moves_statistics, draws of the step
        (draw_anew_when_told_to_draw_the_same, same, ["Sam"]),
        (draw_anew_when_told_to_draw_the_same, draws_again, []),
        (draw_anew_when_told_to_draw_the_same, mean_draws_again, []),
        (draw_the_same_in_each_pass, draws_again, []),
        (move_the_statistics_in_each_pass, moves_statistics, [False]),
        (draw_after_a_map_what_it_drew, later_draws_differ, []),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_test_fails_with(mutate, check, case, monkeypatch):
    if check is same:
        test_update.on_one_device(*case)  # of the unchanged code
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        check(*case)
