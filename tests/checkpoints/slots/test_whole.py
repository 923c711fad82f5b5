"""Checkpoints of sharded optimizers: the same as those of whole ones."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.checkpoints.checkpoints import Checkpoints
from ddl.checkpoints.comparison import object_graph
from ddl.checkpoints.slots.whole import VARIABLE_VALUE_KEY, WholeSlot
from ddl.errors import ModelDirectoryError
from ddl.precision import set_precision
from tests.conftest import make_strategy, save
from tests.step.sharding.trainers import (
    adamw,
    assert_close,
    make,
    memory_of,
    weights,
    whole_slots,
    wide,
)


def of(replicas, shards, **arguments):
    set_precision("float64")
    return make(make_strategy("mirrored", replicas), shards, **arguments)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Trainers after five updates, and the folder that holds them after the third one."""
    found = {}
    for replicas, shards in ((2, False), (2, True), (4, True)):
        folder = tmp_path_factory.mktemp(f"{replicas}-{shards}")
        trainer = of(replicas, shards)
        trainer.train(3, progress=False)
        save(folder, trainer)
        trainer.train(2, progress=False)
        found[replicas, shards] = trainer, folder
    return found


def contents(folder):
    reader = tf.train.load_checkpoint(f"{folder}/step-3")
    names = [n for n in reader.get_variable_to_shape_map() if "OBJECT_GRAPH" not in n]
    return {name: reader.get_tensor(name) for name in names}


def test_names_and_values_are_those_of_whole_slots(trained):
    cases = (2, False), (4, True)
    plain, sharded = (contents(trained[one][1]) for one in cases)
    assert sharded.keys() == plain.keys()
    for name, value in plain.items():
        np.testing.assert_allclose(sharded[name], value, rtol=0, atol=1e-12)
    graphs = [
        object_graph(tf.train.load_checkpoint(f"{trained[one][1]}/step-3")).nodes for one in cases
    ]
    attributes = [
        [
            (a.checkpoint_key, re.sub(r"_\d+", "", a.full_name))
            for node in nodes
            for a in node.attributes
        ]
        for nodes in graphs
    ]
    assert attributes[0] == attributes[1]
    assert any("velocity" in name for _, name in attributes[1])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, False), (2, True)),
        ((2, True), (2, True)),
        ((2, True), (4, True)),
        ((4, True), (2, False)),
    ],
)
def test_a_run_resumes_with_the_switch_and_the_replicas_changed(trained, before, after):
    trainer = of(*after)
    Checkpoints(trained[before][1], trainer).restore_latest()
    trainer.train(2, progress=False)
    straight = trained[before][0]
    tolerance = 0 if before == after else 1e-12
    one, other = (weights(t)[:: t.strategy.num_replicas_in_sync] for t in (trainer, straight))
    assert_close(one, other, atol=tolerance)
    assert_close(whole_slots(trainer), whole_slots(straight), atol=tolerance)


def test_restored_shares_do_not_keep_whole_slots_in_memory():
    trainer = of(2, True, model=wide)
    (shard, *_) = trainer.sharding.slots.values()
    whole = tf.random.normal(shard.shape, dtype=tf.float64)
    slot = WholeSlot(shard.variable.value, shard.shape, trainer.strategy)
    slot._restore_from_tensors({VARIABLE_VALUE_KEY: whole})
    np.testing.assert_array_equal(slot.whole(), whole)
    for copy in trainer.strategy.experimental_local_results(slot.variable):
        assert not np.shares_memory(memory_of(copy), memory_of(whole))


def test_slots_of_another_optimizer_are_refused(trained):
    trainer = of(2, True, optimizer=lambda: keras.optimizers.SGD(0.1, momentum=0.9))
    with pytest.raises(ModelDirectoryError, match="velocity"):
        Checkpoints(trained[2, True][1], trainer).restore_latest()


def test_several_optimizers_are_saved_whole(tmp_path):
    def groups():
        return ddl.optimizers.ParameterGroups(
            {
                "first": ddl.optimizers.Group(keras.optimizers.Adam(0.01), ["first"]),
                "rest": adamw(),
            }
        )

    results = []
    for shards in (False, True):
        trainer = of(2, shards, optimizer=groups)
        trainer.train(1, progress=False)
        save(tmp_path / f"{shards}", trainer)
        reader = tf.train.load_checkpoint(f"{tmp_path}/{shards}/step-1")
        results.append(reader.get_variable_to_shape_map())
    assert results[0].keys() == results[1].keys()
    del results[0]["_CHECKPOINTABLE_OBJECT_GRAPH"], results[1]["_CHECKPOINTABLE_OBJECT_GRAPH"]
    assert results[0] == results[1]
