"""Each way to break an update breaks a contract test.

This is the only module of the contract that uses private names: each function below changes one
place of ddl. A rewrite of such a place brings its function along.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import ddl.data.pipeline as pipeline
from ddl import random
from ddl.data import BatchPipeline
from ddl.errors import TrainingDiverged
from ddl.layers import normalization
from ddl.optimizers.weight_average import WeightAverages
from ddl.step import clipping, engine, rows, sharding
from ddl.step.engine import Engine
from ddl.step.global_gradient import GlobalGradient
from ddl.step.loss import Loss
from ddl.step.overflow import KeptValues
from ddl.step.replicas import AllReduce
from ddl.step.train_step import TrainStep
from tests.contract import cases
from tests.contract.cases import check_parity
from tests.contract.test_draws import check_draws, on_one_device
from tests.contract.test_parity import check_evaluation

TWO = ("mirrored", 2)
TOKENS, IMAGES, SKIPPED, ONE_OVERFLOW = (
    functools.partial(check_parity, name, TWO, evaluates=False)
    for name in ("tokens", "images", "a skipped update", "an overflow on one replica")
)
DRAWS, MICROBATCH_DRAWS = (functools.partial(check_draws, TWO, n, updates=1) for n in (1, 2))
EVALUATION = functools.partial(check_evaluation, TWO)

MUTATIONS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Callable[[], None]]] = {}


def breaks(check: Callable[[], None], home: Any = None, name: str = "") -> Any:
    """Registers a mutation, and the check that must fail.

    Args:
      check: The check.
      home: The class or module of the function that the decorated one replaces, which takes the
        original before its arguments. None: the decorated function takes pytest's `monkeypatch`.
      name: The name of that function.
    """

    def register(broken: Any) -> Any:
        def mutate(patch: pytest.MonkeyPatch) -> None:
            original = getattr(home, name)
            patch.setattr(home, name, lambda *given, **more: broken(original, *given, **more))

        MUTATIONS[broken.__name__] = (mutate if home else broken), check
        return broken

    return register


@breaks(TOKENS, AllReduce, "__call__")
def leave_out_the_reduce(reduce, self, gradients, variables):
    return list(gradients)


@breaks(TOKENS)
def reduce_again_in_the_optimizer(patch):
    prepare = sharding.prepare_optimizer

    def mutated(optimizer, *arguments):
        prepare(optimizer, *arguments)
        del optimizer._all_reduce_sum_gradients

    patch.setattr(sharding, "prepare_optimizer", mutated)
    # Else the check of optimizers refuses it, before parity is asked for.
    patch.setattr(engine, "refusing_reductions", lambda _: contextlib.nullcontext())


@breaks(TOKENS, Loss, "__init__")
def divide_by_the_replicas_own_size(initialize, self, *arguments):
    initialize(self, *arguments)
    self.global_batch_size //= self.replicas


@breaks(TOKENS, GlobalGradient, "_factor")
def do_not_divide_by_the_weights(factor, *_):
    return None


@breaks(IMAGES, GlobalGradient, "_sums_of_replicas")
def average_the_microbatches(summed, self, *arguments):
    gradients, sums = summed(self, *arguments)
    number = self.microbatches
    return self.strategy.run(lambda own: [g / number for g in own], args=(gradients,)), sums


@breaks(TOKENS)
def clip_before_the_reduce(patch):
    clip, reduce = clipping.clip_by_global_norm, AllReduce.__call__

    def mutated(self, gradients, variables):
        clipped = self._strategy.run(
            lambda own: clip(own, 0.2, clipping.squared_norm(own))[0], args=(gradients,)
        )
        return reduce(self, clipped, variables)

    patch.setattr(AllReduce, "__call__", mutated)
    patch.setattr(clipping, "clip_by_global_norm", lambda g, *_: (g, tf.constant(0.0)))


@breaks(TOKENS, rows, "merge_duplicates")
def square_the_parts_of_a_row(merge, gradient):
    return gradient


@breaks(TOKENS, pipeline, "batch_indices")
def count_padding(indices, *arguments, **options):
    index, weight = indices(*arguments, **options)
    return index, np.ones_like(weight)


@breaks(TOKENS, pipeline, "_weighted")
def ignore_the_weights_of_examples(weighted, features, padding):
    return {**features, "weight": padding}


@breaks(SKIPPED)
def move_a_slot_in_a_skipped_update(patch):
    apply, restore, skips = Engine.apply, KeptValues.restore, []

    def mutated(self, *arguments, **others):
        (optimizer,) = (one.optimizer for one in self.plan.applied.values())
        slots = [v.value for v in optimizer.variables if v.path.endswith("momentum")]
        if not slots:
            raise LookupError("the optimizer has no momentum")
        skips.append(lambda: self.gradient.strategy.run(lambda: [s.assign(s * 0.9) for s in slots]))
        return apply(self, *arguments, **others)

    def moved(self):
        skips[-1]()
        restore(self)

    patch.setattr(Engine, "apply", mutated)
    patch.setattr(KeptValues, "restore", moved)


@breaks(SKIPPED, KeptValues, "restore")
def keep_the_moments_of_a_skipped_update(restore, *_):
    return None


@breaks(ONE_OVERFLOW)
def ask_the_first_replica_for_overflow(patch):
    reduce, finite, own = AllReduce.__call__, GlobalGradient.finite, []

    def mutated(self, gradients, variables):
        own[:] = [self._strategy.experimental_local_results(gradient)[0] for gradient in gradients]
        return reduce(self, gradients, variables)

    patch.setattr(AllReduce, "__call__", mutated)
    patch.setattr(GlobalGradient, "finite", lambda self, reduced: finite(self, own))


@breaks(DRAWS, random, "counter_at")
def give_all_replicas_one_stream(counter_at, counter, _):
    return counter


@breaks(DRAWS, BatchPipeline, "_first_row")
def forget_the_row_of_a_replica(first_row, self, number):
    size = self.global_batch_size // self.microbatches
    return first_row(self, number) // size * size


@breaks(MICROBATCH_DRAWS, BatchPipeline, "_first_row")
def forget_the_row_of_a_microbatch(first_row, self, number):
    return first_row(self, number) % (self.global_batch_size // self.microbatches)


@breaks(IMAGES, BatchPipeline, "_own_indices")
def cut_microbatches_out_of_each_share(own_indices, self, *arguments):
    microbatches, self.microbatches = self.microbatches, 1
    found = own_indices(self, *arguments)
    self.microbatches = microbatches
    return found


@breaks(IMAGES, clipping, "add_regularization")
def add_the_penalty_on_each_replica(add, gradients, variables):
    return add(add(gradients, variables), variables)


@breaks(IMAGES, normalization, "batch_moments")
def take_moments_of_each_replica(moments, *given):
    return moments(*given[:-1], False)


@breaks(IMAGES, BatchPipeline, "microbatch")
def take_moments_of_padding(microbatch, self, *arguments, **others):
    made = microbatch(self, *arguments, **others)
    made.mask = None
    return made


@breaks(IMAGES, WeightAverages, "move")
def never_move_the_averages(move, *_):
    return None


@breaks(IMAGES)
def move_the_averages_before_the_weights(patch):
    step, apply, move = TrainStep.__call__, Engine.apply, WeightAverages.move
    steps = []

    def called(self, batches, state):
        steps.append((self.averages, state.step + 1))
        return step(self, batches, state)

    def mutated(self, *given):
        move(*steps[-1], self.gradient.compiler)
        return apply(self, *given)

    patch.setattr(TrainStep, "__call__", called)
    patch.setattr(Engine, "apply", mutated)
    patch.setattr(WeightAverages, "move", lambda *_: None)


@breaks(EVALUATION, Loss, "__call__")
def average_metrics_over_replicas(compute, self, features, training):
    objective, sums = compute(self, features, training)
    return objective, sums if training else tf.math.divide_no_nan(sums, sums[0])


@breaks(EVALUATION, Loss, "__call__")
def evaluate_padding(compute, self, features, training):
    weight = features["weight"]
    # The first example, which padding repeats, has weight 0 itself.
    counted = weight if training else tf.where(weight > 0, weight, tf.ones_like(weight))
    return compute(self, {**features, "weight": counted}, training)


@pytest.fixture(scope="module", autouse=True)
def _references():
    """Computes what the checks compare with before anything is broken."""
    on_one_device()
    for name in ("images", "tokens", "a skipped update", "an overflow on one replica"):
        cases.expected(name)


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_update_fails_its_check(name, monkeypatch):
    mutate, check = MUTATIONS[name]
    mutate(monkeypatch)
    with pytest.raises((AssertionError, TrainingDiverged)):
        check()
