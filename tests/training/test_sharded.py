"""Trainers whose optimizers' state is in shares, and trainers whose state is whole."""

import functools
import logging

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.callbacks.fingerprint import Fingerprint
from ddl.errors import ConfigError, TrainingDiverged
from ddl.optimizers import Group
from ddl.precision import set_precision
from ddl.step import sharding
from ddl.step.all_reduce import AllReduce
from ddl.step.compiled import Compiler
from ddl.step.sharding import InShares, copied_share
from ddl.step.train_step import OptimizerPart
from tests.conftest import LikeGpus, make_strategy
from tests.step.sharding.trainers import (
    adamw,
    after_an_overflow,
    assert_close,
    figures,
    held,
    make,
    network,
    sgd,
    slot_bytes,
    weights,
    wide,
)


def without_kernels():
    optimizer = adamw()
    optimizer.exclude_from_weight_decay(var_names=["kernel"])
    return optimizer


def groups():
    return ddl.optimizers.ParameterGroups(
        {
            "first": Group(keras.optimizers.Adam(0.01), ["first"], frozen_until=2),
            "rest": keras.optimizers.AdamW(0.02, weight_decay=0.1),
        }
    )


@functools.cache
def whole(optimizer, steps=5, **arguments):
    """The figures of a trainer with whole slots."""
    return figures(make(make_strategy("mirrored", 2), False, optimizer, **arguments), steps)


@pytest.mark.parametrize(
    ("optimizer", "arguments"),
    [
        (
            without_kernels,
            {"accumulation_steps": 2, "weight_average": ddl.ExponentialMovingAverage(0.9)},
        ),
        (functools.partial(keras.optimizers.Adam, 0.01, amsgrad=True), {"clip_norm": 0.3}),
    ],
)
def test_updates_are_the_same(optimizer, arguments):
    set_precision("float64")
    strategy = make_strategy("mirrored", 2)
    trainer = make(strategy, True, optimizer, **arguments)
    assert_close(figures(trainer), figures(make(strategy, False, optimizer, **arguments)))
    assert trainer.trace_count == 1


def test_parameter_groups_are_the_same():
    """One group is frozen at first, and counts in no norm."""
    set_precision("float64")
    strategy = make_strategy("mirrored", 2)

    def trained(shards):
        trainer = make(strategy, shards, groups, clip_norm=0.05)
        norms = [trainer.train(1, progress=False)["gradient_norm"] for _ in range(4)]
        return [np.array(norms), *weights(trainer)]

    assert_close(trained(True), trained(False))


def test_collectives_exchange_the_same(gpu_path):
    set_precision("float64")
    trainer = make(LikeGpus(2), True, adamw, clip_norm=0.3)
    assert_close(figures(trainer), whole(adamw, clip_norm=0.3))


def test_compiled_updates_are_the_same():
    set_precision("float64")
    trainer = make(make_strategy("mirrored", 2), True, jit_compile="on", clip_norm=0.3)
    found = figures(trainer)
    assert trainer._parts.update.compiler.is_on
    assert_close(found, whole(adamw, clip_norm=0.3))


def test_each_replica_holds_its_share_of_the_slots():
    set_precision("float32")
    replicas = 4

    def model():
        return keras.Sequential([keras.Input([7]), keras.layers.Dense(401), keras.layers.Dense(5)])

    of_whole = slot_bytes(make(make_strategy("one_device", 1), False, model=model))[0]
    trainer = make(make_strategy("mirrored", replicas), True, model=model)
    assert len(slot_bytes(trainer)) == replicas
    assert max(slot_bytes(trainer)) <= of_whole * (1 / replicas + 0.02)
    trainer.train(2, progress=False)
    assert max(slot_bytes(trainer)) <= of_whole * (1 / replicas + 0.02)
    # The stand-ins of the weights hold memory during an update alone.
    stand_ins = trainer.optimizer._trainable_variables
    copies = [c for v in stand_ins for c in trainer.strategy.experimental_local_results(v.value)]
    assert len(copies) == replicas * 4
    sizes = [tf.raw_ops.ReadVariableOp(resource=c.handle, dtype=c.dtype).shape for c in copies]
    assert all(size == [0] for size in sizes)


def test_a_share_of_a_weight_takes_memory_once_its_gradient_is_in_shares(monkeypatch):
    strategy = make_strategy("mirrored", 2)
    trainer = make(strategy, True, sgd, model=wide)
    (variable,) = trainer.model.trainable_variables
    waits, own = [], sharding.own_share

    def own_share(value):
        waits.append([operation.type for operation in tf.no_op().control_inputs])
        return own(value)

    @tf.function(autograph=False)
    def update(gradient):
        given = strategy.run(lambda: tf.identity(gradient))
        sharding.apply_to_shares(
            *(trainer.sharding, InShares([given]), None, [variable]),
            *([OptimizerPart(trainer.optimizer, [0])], None),
            *(tf.constant(0, tf.int64), Compiler("off", strategy, "training")),
        )

    monkeypatch.setattr(sharding, "own_share", own_share)
    update.get_concrete_function(tf.zeros([7 * 64 // 2]))
    assert waits == [["Identity"]] * 2


def test_shares_and_layers_computed_again_work_together():
    """With microbatches, clipping, averages, and an overflow on one replica in mixed_float16."""
    strategy = make_strategy("mirrored", 2)
    trainer = after_an_overflow(strategy, True, remat=ddl.Remat("first"))
    assert_close(figures(trainer), figures(after_an_overflow(strategy, False)), atol=1e-6)
    assert trainer.skipped_updates == 1
    assert trainer.sharding is not None
    assert trainer._parts.update.gradient.remat is not None


def test_shares_are_exchanged_as_on_gpus(gpu_path):
    """Each replica adds in variables on its own device; compiled."""
    set_precision("float64")
    arguments = {"accumulation_steps": 2, "clip_norm": 0.3}
    trainer = make(LikeGpus(2), True, sgd, jit_compile="on", **arguments)
    assert_close(figures(trainer), whole(sgd, **arguments))


class OwnSteps(ddl.Classification):
    """Minimizes one loss, and applies gradients of another that it has computed with."""

    def second(self, features, training):
        logits = self.model(features["image"], training=training)
        return ddl.PerExample(tf.reduce_sum(tf.square(logits), axis=-1))

    def step(self, update, batch):
        update.minimize(self.per_example, batch, optimizer="sgd")
        second = update.gradients(self.second, batch)
        second *= tf.minimum(tf.cast(1.0, second.norm().dtype), 1 / second.norm())
        update.when(update.step % 2 == 0, lambda: update.apply(0.5 * second, "adam"))


def two_optimizers():
    return {"sgd": keras.optimizers.SGD(0.1, momentum=0.9), "adam": keras.optimizers.Adam(0.01)}


def test_a_step_of_its_own_makes_the_same_updates():
    set_precision("float64")
    strategy = make_strategy("mirrored", 2)

    def trained(shards):
        trainer = make(strategy, shards, two_optimizers, OwnSteps)
        trainer.train(3, progress=False)
        return weights(trainer)

    assert_close(trained(True), trained(False))


def test_a_step_of_its_own_restores_shares_after_an_overflow():
    """The second gradient overflows after the first was applied."""
    set_precision("mixed_float16")
    strategy = make_strategy("mirrored", 2)

    class Late(OwnSteps):
        def second(self, features, training):
            output = super().second(features, training)
            return output._replace(loss=output.loss * 1e38 * 1e38)

    trainer = make(
        *(strategy, True, two_optimizers, Late),
        loss_scale=ddl.LossScale(1024.0),
        max_skipped_updates=1,
    )
    before = held(trainer)
    with pytest.raises(TrainingDiverged):
        trainer.train(1, progress=False)
    assert_close(held(trainer), before, atol=0)


def test_weights_excluded_from_decay_are_excluded_by_their_shares():
    """A user names weights after the Trainer is made."""
    set_precision("float64")
    strategy = make_strategy("mirrored", 2)

    def trained(shards):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model, optimizer = network(), adamw()
        trainer = make(strategy, shards, lambda: optimizer, model=lambda: model)
        optimizer.exclude_from_weight_decay(var_list=[model.layers[0].kernel])
        trainer.train(2, progress=False)
        return weights(trainer)

    assert_close(trained(True), trained(False))


def test_a_change_of_any_share_changes_the_fingerprint():
    trainer = make(make_strategy("mirrored", 2), True)
    fingerprint = Fingerprint(trainer)
    before = fingerprint(None)
    slot = trainer.optimizer.variables[-1].value
    last = trainer.strategy.experimental_local_results(slot)[-1]
    last.assign_add(tf.ones_like(last))
    assert fingerprint(None) != before


# ------------------------------------------------------------ mutations


def leave_out_the_gather(patch):
    def own_copied(values, shapes):
        replicas = tf.distribute.get_replica_context().num_replicas_in_sync
        return [
            tf.reshape(tf.tile(value, [replicas])[: shape.num_elements()], shape)
            for value, shape in zip(values, shapes, strict=True)
        ]

    patch.setattr(sharding, "gathered", own_copied)


def deal_a_share_to_the_wrong_replica(patch):
    def wrong(value):
        replicas = tf.distribute.get_replica_context().num_replicas_in_sync
        replica = tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group)
        return copied_share(value, (int(replica) + 1) % replicas, replicas)

    patch.setattr(sharding, "own_share", wrong)


def reduce_twice(patch):
    scatter = sharding.scatter_over_replicas
    patch.setattr(sharding, "scatter_over_replicas", lambda rows: [2 * x for x in scatter(rows)])


def take_the_norm_of_the_first_share(patch):
    of_sums = AllReduce.of_sums

    def first(self, sums):
        own = self._strategy.experimental_local_results(sums)[0]
        return own if own.shape == [1] else of_sums(self, sums)

    patch.setattr(AllReduce, "of_sums", first)


@pytest.mark.parametrize(
    "mutate",
    [
        leave_out_the_gather,
        deal_a_share_to_the_wrong_replica,
        reduce_twice,
        take_the_norm_of_the_first_share,
    ],
)
def test_a_broken_part_fails_the_parity(mutate, monkeypatch):
    set_precision("float64")
    mutate(monkeypatch)
    found = figures(make(make_strategy("mirrored", 2), True, sgd, clip_norm=0.3), steps=2)
    monkeypatch.undo()
    with pytest.raises(AssertionError):
        assert_close(found, whole(sgd, steps=2, clip_norm=0.3))


# ------------------------------------------------------------ refusals


def test_one_replica_says_that_it_has_no_effect(caplog):
    with caplog.at_level(logging.WARNING):
        trainer = make(make_strategy("one_device", 1), True)
    assert trainer.sharding is None
    assert "shard_optimizer_state) has no effect on one replica" in caplog.text


def test_a_strategy_with_one_copy_of_each_variable_is_refused():
    with pytest.raises(ConfigError, match="a copy of each variable.*got CentralStorage"):
        make(make_strategy("central_storage", 2), True)


class Own(keras.optimizers.SGD):
    """An optimizer of which nothing is known."""


@pytest.mark.parametrize(
    "optimizer",
    [
        ddl.optimizers.LAMB,
        ddl.optimizers.LARS,
        keras.optimizers.Lamb,
        keras.optimizers.Adafactor,
        keras.optimizers.Muon,
        Own,
    ],
)
def test_optimizers_that_are_not_known_to_compute_by_entry_are_refused(optimizer):
    name = optimizer.__name__
    with pytest.raises(ConfigError, match=f"elementwise optimizers.*got {name} .*Leave"):
        make(make_strategy("mirrored", 2), True, optimizer)


def test_an_optimizer_with_whole_slots_is_refused():
    strategy = make_strategy("mirrored", 2)
    with strategy.scope():
        model = keras.Sequential([keras.Input([7]), keras.layers.Dense(5)])
        optimizer = adamw()
        optimizer.build(model.trainable_variables)
    with pytest.raises(ConfigError, match="which is built"):
        make(strategy, True, lambda: optimizer, model=lambda: model)


def test_another_value_is_refused():
    with pytest.raises(ConfigError, match="shard_optimizer_state must be True or False"):
        make(make_strategy("mirrored", 2), "yes")
