"""Each way to break an update breaks a contract test.

This is the only module of the contract that uses private names: each function below changes one
place of ddl. A rewrite of such a place brings its row of the table along.
"""

import contextlib
import functools

import numpy as np
import pytest
import tensorflow as tf

import ddl.data.pipeline
import ddl.layers.normalization
from ddl import random
from ddl.data import BatchPipeline
from ddl.errors import TrainingDiverged
from ddl.step import gradients as gradient_path
from ddl.step import overflow, sharding, train_step
from ddl.step.all_reduce import AllReduce
from ddl.step.global_gradient import GlobalGradient
from ddl.step.loss import Loss
from ddl.step.overflow import KeptValues
from ddl.step.train_step import TrainStep
from ddl.step.weight_average import WeightAverages
from tests.contract import cases
from tests.contract.cases import check_parity
from tests.contract.test_draws import check_draws, on_one_device
from tests.contract.test_parity import check_evaluation

Patch = pytest.MonkeyPatch
TWO = ("mirrored", 2)


def leave_out_the_reduce(patch: Patch) -> None:
    patch.setattr(AllReduce, "__call__", lambda _, gradients, variables: list(gradients))


def reduce_again_in_the_optimizer(patch: Patch) -> None:
    prepare = sharding.prepare_optimizer

    def mutated(optimizer, *arguments):
        prepare(optimizer, *arguments)
        del optimizer._all_reduce_sum_gradients

    patch.setattr(sharding, "prepare_optimizer", mutated)
    # Else the check of optimizers refuses it, before parity is asked for.
    patch.setattr("ddl.step.train_step.refusing_reductions", lambda _: contextlib.nullcontext())


def divide_by_the_replicas_own_size(patch: Patch) -> None:
    initialize = Loss.__init__

    def mutated(self, *arguments):
        initialize(self, *arguments)
        self._global_batch_size //= self._replicas

    patch.setattr(Loss, "__init__", mutated)


def do_not_divide_by_the_weights(patch: Patch) -> None:
    patch.setattr(GlobalGradient, "_factor", lambda *_: None)


def average_the_microbatches(patch: Patch) -> None:
    of_replicas = GlobalGradient.of_replicas

    def mutated(self, *arguments):
        gradients, sums = of_replicas(self, *arguments)
        number = self.microbatches
        return self.strategy.run(lambda own: [g / number for g in own], args=(gradients,)), sums

    patch.setattr(GlobalGradient, "of_replicas", mutated)


def clip_before_the_reduce(patch: Patch) -> None:
    clip, reduce = gradient_path.clip_by_global_norm, AllReduce.__call__

    def mutated(self, gradients, variables):
        clipped = self._strategy.run(lambda own: clip(own, 0.2)[0], args=(gradients,))
        return reduce(self, clipped, variables)

    patch.setattr(AllReduce, "__call__", mutated)
    patch.setattr(gradient_path, "clip_by_global_norm", lambda g, *_: (g, tf.constant(0.0)))


def square_the_parts_of_a_row(patch: Patch) -> None:
    patch.setattr("ddl.step.gradients.merge_duplicates", lambda gradient: gradient)


def count_padding(patch: Patch) -> None:
    indices = ddl.data.pipeline.batch_indices

    def mutated(*arguments, **options):
        index, weight = indices(*arguments, **options)
        return index, np.ones_like(weight)

    patch.setattr(ddl.data.pipeline, "batch_indices", mutated)


def ignore_the_weights_of_examples(patch: Patch) -> None:
    module = ddl.data.pipeline
    patch.setattr(module, "_weighted", lambda features, padding: {**features, "weight": padding})


def move_a_slot_in_a_skipped_update(patch: Patch) -> None:
    apply, unless_overflow = TrainStep.apply, train_step.unless_overflow

    def mutated(self, *arguments, **others):
        (optimizer,) = self.optimizers.values()
        slots = [v.value for v in optimizer.variables if v.path.endswith("momentum")]
        if not slots:
            raise LookupError("the optimizer has no momentum")

        def move():
            for slot in slots:
                slot.assign(slot * 0.9)

        skips.append(lambda: self.strategy.run(move))
        return apply(self, *arguments, **others)

    def skipping(strategy, finite, change, undo):
        def moved():
            skips[-1]()
            undo()

        return unless_overflow(strategy, finite, change, moved)

    skips = []
    patch.setattr(TrainStep, "apply", mutated)
    patch.setattr(train_step, "unless_overflow", skipping)


def keep_the_moments_of_a_skipped_update(patch: Patch) -> None:
    patch.setattr(KeptValues, "restore", lambda *_: None)


def ask_the_first_replica_for_overflow(patch: Patch) -> None:
    reduce, finite, own = AllReduce.__call__, overflow.each_finite, []

    def mutated(self, gradients, variables):
        own[:] = [self._strategy.experimental_local_results(gradient)[0] for gradient in gradients]
        return reduce(self, gradients, variables)

    patch.setattr(AllReduce, "__call__", mutated)
    patch.setattr(overflow, "each_finite", lambda reduced: finite(own))


def give_all_replicas_one_stream(patch: Patch) -> None:
    patch.setattr(random, "counter_at", lambda counter, _: counter)


def forget_the_row_of_a_replica(patch: Patch) -> None:
    first_row = BatchPipeline._first_row

    def mutated(self, number):
        size = self.global_batch_size // self.microbatches
        return first_row(self, number) // size * size

    patch.setattr(BatchPipeline, "_first_row", mutated)


def forget_the_row_of_a_microbatch(patch: Patch) -> None:
    first_row = BatchPipeline._first_row

    def mutated(self, number):
        return first_row(self, number) % (self.global_batch_size // self.microbatches)

    patch.setattr(BatchPipeline, "_first_row", mutated)


def cut_microbatches_out_of_each_share(patch: Patch) -> None:
    own_indices = BatchPipeline._own_indices

    def mutated(self, first, count, workers):
        microbatches, self.microbatches = self.microbatches, 1
        found = own_indices(self, first, count, workers)
        self.microbatches = microbatches
        return found

    patch.setattr(BatchPipeline, "_own_indices", mutated)


def add_the_penalty_on_each_replica(patch: Patch) -> None:
    add = gradient_path.add_regularization
    patch.setattr(gradient_path, "add_regularization", lambda g, v: add(add(g, v), v))


def take_moments_of_each_replica(patch: Patch) -> None:
    moments = ddl.layers.normalization.batch_moments
    patch.setattr(
        ddl.layers.normalization, "batch_moments", lambda *given: moments(*given[:-1], False)
    )


def take_moments_of_padding(patch: Patch) -> None:
    microbatch = BatchPipeline.microbatch

    def mutated(self, *arguments, **others):
        made = microbatch(self, *arguments, **others)
        made.mask = None
        return made

    patch.setattr(BatchPipeline, "microbatch", mutated)


def never_move_the_averages(patch: Patch) -> None:
    patch.setattr(WeightAverages, "update", lambda *_: None)


def move_the_averages_before_the_weights(patch: Patch) -> None:
    apply, move = TrainStep.apply, TrainStep._move_averages

    def mutated(self, optimizer, variables, values, factor, state):
        move(self, state)
        return apply(self, optimizer, variables, values, factor, state)

    patch.setattr(TrainStep, "apply", mutated)
    patch.setattr(TrainStep, "_move_averages", lambda *_: None)


def average_metrics_over_replicas(patch: Patch) -> None:
    compute = Loss.__call__

    def mutated(self, features, training):
        objective, sums = compute(self, features, training)
        return objective, sums if training else tf.math.divide_no_nan(sums, sums[0])

    patch.setattr(Loss, "__call__", mutated)


def evaluate_padding(patch: Patch) -> None:
    compute = Loss.__call__

    def mutated(self, features, training):
        weight = features["weight"]
        # The first example, which padding repeats, has weight 0 itself.
        counted = weight if training else tf.where(weight > 0, weight, tf.ones_like(weight))
        return compute(self, {**features, "weight": counted}, training)

    patch.setattr(Loss, "__call__", mutated)


def trained(name: str):
    return functools.partial(check_parity, name, TWO, evaluates=False)


# The broken place, and the check that must fail.
MUTATIONS = [
    (leave_out_the_reduce, trained("tokens")),
    (reduce_again_in_the_optimizer, trained("tokens")),
    (divide_by_the_replicas_own_size, trained("tokens")),
    (do_not_divide_by_the_weights, trained("tokens")),
    (average_the_microbatches, trained("images")),
    (clip_before_the_reduce, trained("tokens")),
    (square_the_parts_of_a_row, trained("tokens")),
    (count_padding, trained("tokens")),
    (ignore_the_weights_of_examples, trained("tokens")),
    (move_a_slot_in_a_skipped_update, trained("a skipped update")),
    (keep_the_moments_of_a_skipped_update, trained("a skipped update")),
    (ask_the_first_replica_for_overflow, trained("an overflow on one replica")),
    (give_all_replicas_one_stream, functools.partial(check_draws, TWO, 1, updates=1)),
    (forget_the_row_of_a_replica, functools.partial(check_draws, TWO, 1, updates=1)),
    (forget_the_row_of_a_microbatch, functools.partial(check_draws, TWO, 2, updates=1)),
    (cut_microbatches_out_of_each_share, trained("images")),
    (add_the_penalty_on_each_replica, trained("images")),
    (take_moments_of_each_replica, trained("images")),
    (take_moments_of_padding, trained("images")),
    (never_move_the_averages, trained("images")),
    (move_the_averages_before_the_weights, trained("images")),
    (average_metrics_over_replicas, functools.partial(check_evaluation, TWO)),
    (evaluate_padding, functools.partial(check_evaluation, TWO)),
]


@pytest.fixture(scope="module", autouse=True)
def _references():
    """Computes what the checks compare with before anything is broken."""
    on_one_device()
    for name in ("images", "tokens", "a skipped update", "an overflow on one replica"):
        cases.expected(name)


@pytest.mark.parametrize(
    ("mutate", "check"), MUTATIONS, ids=[each[0].__name__ for each in MUTATIONS]
)
def test_a_broken_update_fails_its_check(mutate, check, monkeypatch):
    mutate(monkeypatch)
    with pytest.raises((AssertionError, TrainingDiverged)):
        check()
