"""What the tests of the verbs can find: one thing is broken at a time, and a test must fail."""

from collections.abc import Callable, Sequence

import pytest
import tensorflow as tf

from ddl.step.all_reduce import AllReduce
from ddl.step.global_gradient import GlobalGradient
from ddl.step.kept_values import KeptValues
from ddl.step.update import UpdateStep
from ddl.step.verbs import update as verbs
from ddl.step.verbs.plan import StepPlan
from tests.step.verbs import test_update

Patch = pytest.MonkeyPatch


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
        return multiplied(self, multiplied(self, gradients, factor), tf.constant(0.5))

    patch.setattr(GlobalGradient, "_multiplied", mutated)


def average_once_a_replica(patch: Patch) -> None:
    move = verbs._move

    def mutated(variable, source, share):
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        for _ in range(replicas):
            moved = move(variable, source, share)
        return moved

    patch.setattr(verbs, "_move", mutated)


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
    apply = UpdateStep.apply

    def mutated(self, optimizer, gradients):
        replicas = float(self.strategy.num_replicas_in_sync)
        return apply(self, optimizer, gradients * replicas)

    patch.setattr(UpdateStep, "apply", mutated)


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
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_test_fails_with(mutate, check, case, monkeypatch):
    if check is same:
        test_update.on_one_device(*case)  # of the unchanged code
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        check(*case)
