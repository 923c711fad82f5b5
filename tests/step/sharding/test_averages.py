"""Averages of the weights in shares, and whole ones."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.callbacks.fingerprint import Fingerprint
from ddl.checkpoints.checkpoints import Checkpoints
from ddl.errors import TrainingDiverged
from ddl.precision import set_precision
from tests.conftest import LikeGpus, make_strategy, save
from tests.step.sharding.trainers import assert_close, make, memory_of, wide

RULE = ddl.ExponentialMovingAverage(0.9)


def network():
    """Weights of odd sizes, and statistics that differ between replicas."""
    return keras.Sequential(
        [
            keras.Input([7]),
            keras.layers.Dense(11, activation="tanh"),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(5),
        ],
        name="network",
    )


def sgd():
    return keras.optimizers.SGD(0.1, momentum=0.9)


def of(strategy, shards, **arguments):
    """A trainer in float64 with averages."""
    set_precision("float64")
    given = {"model": network, "weight_average": RULE} | arguments
    return make(strategy, shards, sgd, eval_data=(np.ones([8, 7]), np.zeros(8, int)), **given)


def averaged(trainer):
    """The loss of an evaluation, and the weights that it uses, on each replica."""
    loss = trainer.evaluate()["loss"]
    results = trainer.strategy.experimental_local_results
    with trainer.evaluation_weights():
        return [np.array(loss)] + [
            copy.numpy() for v in trainer.model.variables for copy in results(v.value)
        ]


def plain_weights(trainer):
    results = trainer.strategy.experimental_local_results
    return [copy.numpy() for v in trainer.model.variables for copy in results(v.value)]


@functools.cache
def trained(replicas, shards):
    """A trainer after three updates; the tests leave it as it is."""
    trainer = of(make_strategy("mirrored", replicas), shards)
    trainer.train(3, progress=False)
    return trainer


@pytest.mark.parametrize("replicas", [2, 4])
def test_evaluations_are_the_same(replicas):
    sharded, whole = (trained(replicas, shards) for shards in (True, False))
    before = plain_weights(sharded)
    assert_close(averaged(sharded), averaged(whole))
    assert_close(plain_weights(sharded), before, atol=0)
    results = sharded.strategy.experimental_local_results
    sizes = [[tf.size(copy) for copy in results(v)] for v in sharded.averages.variables]
    of_whole = [v.shape.num_elements() for v in whole.averages.variables]
    assert sizes[:2] == [[-(-of_whole[0] // replicas)] * replicas, [-(-11 // replicas)] * replicas]


@pytest.mark.parametrize("after", [(2, False), (2, True), (4, True)])
@pytest.mark.parametrize("before", [(2, False), (2, True)])
def test_checkpoints_hold_whole_averages(before, after, tmp_path):
    source = trained(*before)
    save(tmp_path, source)
    found = of(make_strategy("mirrored", after[0]), after[1])
    Checkpoints(tmp_path, found).restore_latest()
    replicas = [t.strategy.num_replicas_in_sync for t in (source, found)]
    one, other = (averaged(t)[1::n] for t, n in zip((source, found), replicas, strict=True))
    assert_close(other, one, atol=0 if before[0] == after[0] else 1e-12)
    reader = tf.train.load_checkpoint(f"{tmp_path}/step-3")
    shapes = reader.get_variable_to_shape_map()
    assert shapes["averages/0/.ATTRIBUTES/VARIABLE_VALUE"] == [7, 11]


@pytest.mark.parametrize("jit_compile", ["on", "off"])
def test_averages_in_buffers_are_the_same(gpu_path, jit_compile):
    trainer = of(LikeGpus(2), True, jit_compile=jit_compile)
    trainer.train(3, progress=False)
    assert_close(averaged(trainer), averaged(trained(2, False)))


def test_each_share_counts():
    """In a warm start, a fingerprint and the check for divergence."""
    trainer = of(make_strategy("mirrored", 2), True)
    for variable in trainer.model.trainable_variables:
        variable.assign(tf.ones_like(variable))
    trainer.averages.reset()
    assert_close(averaged(trainer)[1:], plain_weights(trainer), atol=0)
    fingerprint = Fingerprint(trainer)
    before = fingerprint(None)
    last = trainer.strategy.experimental_local_results(trainer.averages.variables[0])[-1]
    last.assign_add(tf.ones_like(last))
    assert fingerprint(None) != before
    last.assign(np.inf * tf.ones_like(last))
    with pytest.raises(TrainingDiverged, match="average/.*kernel"):
        trainer.check_finite()


def test_shares_do_not_keep_whole_weights_in_memory():
    trainer = of(make_strategy("mirrored", 2), True, model=wide)
    (average,), (weight,) = trainer.averages.variables, trainer.model.variables
    results = trainer.strategy.experimental_local_results
    for copy, whole in zip(results(average), results(weight.value), strict=True):
        assert not np.shares_memory(memory_of(copy), memory_of(whole))
