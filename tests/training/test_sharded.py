"""Memory of a trainer whose optimizer's state is in shares."""

import keras
import tensorflow as tf

from ddl.precision import set_precision
from tests.conftest import make_strategy
from tests.step.sharding.trainers import make, slot_bytes


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
