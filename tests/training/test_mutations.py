"""What the parity tests can find: one thing is removed at a time, and a test must fail."""

import contextlib

import pytest
import tensorflow as tf

import ddl.layers.normalization
import ddl.random
from ddl.data import BatchPipeline
from ddl.step import gradients as gradient_path
from ddl.step import overflow
from ddl.step.all_reduce import AllReduce
from ddl.step.global_gradient import GlobalGradient
from ddl.step.objective import Objective
from ddl.step.overflow import KeptValues
from ddl.step.sharding import optimizers as sharding_optimizers
from tests.conftest import make_strategy, name_of
from tests.layers import test_dropout_and_noise
from tests.training import test_parity, test_trainer
from tests.training.parity_cases import COMBINED, differences, reference

pytestmark = pytest.mark.usefixtures("rows_checked_on_one_device")

Patch = pytest.MonkeyPatch


def overflow_on_replica_1() -> None:
    test_trainer.check_that_overflows_change_nothing(make_strategy("mirrored", 2), [1])


def overflow_without_layers_that_spread_it() -> None:
    """Synchronized layers carry an infinity to the other replicas' gradients."""
    test_trainer.check_that_overflows_change_nothing(
        make_strategy("mirrored", 2), [1], batch_normalization=False
    )


def divide_by_the_replicas_own_rows(patch: Patch) -> None:
    initialize = Objective.__init__

    def mutated(self, task, spec, global_batch_size, strategy, *others):
        initialize(self, task, spec, global_batch_size, strategy, *others)
        self._global_batch_size //= strategy.num_replicas_in_sync

    patch.setattr(Objective, "__init__", mutated)


def leave_out_the_reduce(patch: Patch) -> None:
    patch.setattr(AllReduce, "__call__", lambda _, gradients, variables: list(gradients))


def let_keras_reduce_again(patch: Patch) -> None:
    prepare = sharding_optimizers.prepare_optimizer

    def mutated(optimizer, *arguments):
        prepare(optimizer, *arguments)
        del optimizer._all_reduce_sum_gradients

    patch.setattr(sharding_optimizers, "prepare_optimizer", mutated)
    # Else the check of optimizers refuses it, before parity is asked for.
    patch.setattr("ddl.step.verbs.applying.refusing_reductions", lambda _: contextlib.nullcontext())


def clip_before_the_reduce(patch: Patch) -> None:
    clip, reduce = gradient_path.clip_by_global_norm, AllReduce.__call__

    def mutated(self, gradients, variables):
        clipped = self._strategy.run(lambda own: clip(own, 0.05)[0], args=(gradients,))
        return reduce(self, clipped, variables)

    patch.setattr(AllReduce, "__call__", mutated)
    patch.setattr(gradient_path, "clip_by_global_norm", lambda g, *_: (g, tf.constant(0.0)))


def ask_the_first_replica_before_the_reduce(patch: Patch) -> None:
    reduce, finite, own = AllReduce.__call__, overflow.each_finite, []

    def mutated(self, gradients, variables):
        own[:] = [self._strategy.experimental_local_results(gradient)[0] for gradient in gradients]
        return reduce(self, gradients, variables)

    patch.setattr(AllReduce, "__call__", mutated)
    patch.setattr(overflow, "each_finite", lambda reduced: finite(own))


def give_all_replicas_one_stream(patch: Patch) -> None:
    counter = ddl.random._counter
    patch.setattr(ddl.random, "_counter", lambda current, _: counter(current, 0))


def forget_the_position(patch: Patch) -> None:
    patch.setattr(BatchPipeline, "_first_row", lambda *_: tf.zeros([], tf.int64))


def take_moments_of_each_replica(patch: Patch) -> None:
    moments = ddl.layers.normalization.batch_moments
    patch.setattr(
        ddl.layers.normalization,
        "batch_moments",
        lambda *args: moments(*args[:-1], False),
    )


def cut_microbatches_out_of_each_share(patch: Patch) -> None:
    own_rows = BatchPipeline.own_rows

    def mutated(self, strategy):
        microbatches, self.microbatches = self.microbatches, 1
        try:
            return own_rows(self, strategy)
        finally:
            self.microbatches = microbatches

    patch.setattr(BatchPipeline, "own_rows", mutated)


def leave_out_the_weights(patch: Patch) -> None:
    patch.setattr(GlobalGradient, "factor", lambda *_: None)


def add_the_penalty_on_each_replica(patch: Patch) -> None:
    add = gradient_path.add_regularization
    patch.setattr(
        gradient_path,
        "add_regularization",
        lambda gradients, variables: add(add(gradients, variables), variables),
    )


def square_the_parts_of_a_row(patch: Patch) -> None:
    patch.setattr("ddl.step.gradients.values.merge_duplicates", lambda gradient: gradient)


def keep_the_moments_of_a_skipped_update(patch: Patch) -> None:
    patch.setattr(KeptValues, "restore", lambda *_: None)


def give_all_microbatches_one_position(patch: Patch) -> None:
    first_row = BatchPipeline._first_row
    patch.setattr(
        BatchPipeline, "_first_row", lambda self, *args: first_row(self, *args) % _ROWS_OF_ONE
    )


_ROWS_OF_ONE = 8  # of a batch of 32 in 4 microbatches
RICH, SPARSE, NOISY = COMBINED
ON_TWO, ON_CENTRAL = ("mirrored", 2), ("central_storage", 2)

# The removed step, and the strategy and the case of tests/training/test_parity.py that must differ
# from one device.
PARITY = [
    (divide_by_the_replicas_own_rows, ON_TWO, "plain"),
    (leave_out_the_reduce, ON_TWO, "plain"),
    (leave_out_the_reduce, ON_CENTRAL, SPARSE),
    (let_keras_reduce_again, ON_TWO, "plain"),
    (clip_before_the_reduce, ON_TWO, RICH),
    (forget_the_position, ON_TWO, NOISY),
    (forget_the_position, ON_TWO, "augmentation"),
    (forget_the_position, ON_CENTRAL, RICH),
    (give_all_microbatches_one_position, ON_TWO, NOISY),
    (take_moments_of_each_replica, ON_TWO, "synchronized BatchNormalization, 131 examples"),
    (cut_microbatches_out_of_each_share, ON_TWO, RICH),
    (cut_microbatches_out_of_each_share, ON_TWO, NOISY),
    (leave_out_the_weights, ON_TWO, "accumulation 4 against the whole batch"),
    (add_the_penalty_on_each_replica, ON_TWO, "accumulation 4 against the whole batch"),
    (square_the_parts_of_a_row, ON_TWO, SPARSE),
    (square_the_parts_of_a_row, ON_CENTRAL, SPARSE),
]


@pytest.mark.parametrize(
    ("take_out", "where", "case"),
    PARITY,
    ids=[f"{take_out.__name__}: {name_of(where)}, {case}" for take_out, where, case in PARITY],
)
def test_parity_fails_without(take_out, where, case, monkeypatch):
    reference(case, "float64")  # of the unchanged code
    take_out(monkeypatch)
    largest = differences(case, make_strategy(*where), "float64")
    with pytest.raises(AssertionError):
        test_parity.assert_small(case, largest, 1e-10)


@pytest.mark.parametrize(
    ("take_out", "check"),
    [
        (ask_the_first_replica_before_the_reduce, overflow_without_layers_that_spread_it),
        (keep_the_moments_of_a_skipped_update, overflow_on_replica_1),
        (give_all_replicas_one_stream, test_dropout_and_noise.check_keras_masks_differ),
    ],
    ids=lambda function: function.__name__,
)
def test_a_check_fails_without(take_out, check, monkeypatch):
    check()
    take_out(monkeypatch)
    with pytest.raises(AssertionError):
        check()
