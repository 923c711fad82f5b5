"""Small trainers with their optimizers' state in shares or whole, and what they trained."""

import keras
import numpy as np
import tensorflow as tf

import ddl

_RANDOM = np.random.default_rng(0)
DATA = (_RANDOM.normal(size=(70, 7)), _RANDOM.integers(0, 5, 70))


def network() -> keras.Model:
    """Weights of odd sizes, with a penalty and a constraint."""
    penalty, constraint = keras.regularizers.L2(0.01), keras.constraints.MaxNorm(0.5)
    first = keras.layers.Dense(11, "tanh", kernel_regularizer=penalty)
    logits = keras.layers.Dense(5, kernel_constraint=constraint)
    return keras.Sequential([keras.Input([7]), first, keras.layers.Dropout(0.2), logits])


def adamw():
    return keras.optimizers.AdamW(0.01, weight_decay=0.1)


def make(strategy, shards, optimizer=adamw, **arguments):
    """Builds a trainer; the same weights whatever the arguments."""
    keras.utils.set_random_seed(0)
    with strategy.scope():
        return ddl.Trainer(
            ddl.Classification(network()),
            optimizer(),
            DATA,
            **{"global_batch_size": 16, "seed": 3} | arguments,
            strategy=strategy,
            shard_optimizer_state=shards,
        )


def weights(trainer) -> list[np.ndarray]:
    """The weights of each replica of this process."""
    return [
        copy.numpy()
        for variable in trainer.model.variables
        for copy in trainer.strategy.experimental_local_results(variable.value)
    ]


def whole_slots(trainer) -> list[np.ndarray]:
    """The optimizer's variables of one replica, whole, without the counter and the rate."""
    found = []
    for variable in trainer.optimizer.variables[2:]:
        copies = trainer.strategy.experimental_local_results(variable.value)
        if trainer.sharding is None or id(variable.value) not in trainer.sharding.slots:
            found.append(copies[0].numpy())
            continue
        shape = trainer.sharding.slots[id(variable.value)]
        rows = np.concatenate([copy.numpy() for copy in copies])
        found.append(rows[: shape.num_elements()].reshape(shape))
    return found


def averages(trainer) -> list[np.ndarray]:
    """The averages of the weights on each replica of this process, if there are any."""
    if trainer.averages is None:
        return []
    with trainer.evaluation_weights():
        return weights(trainer)


def assert_close(one, other, atol=1e-10):
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=atol)


def slot_bytes(trainer) -> list[int]:
    """The bytes of the slots on each replica of this process."""
    slots = [v.value for v in trainer.optimizer.variables if v.value.shape.rank]
    copies = [trainer.strategy.experimental_local_results(v) for v in slots]
    return [
        sum(tf.size(copy).numpy() * copy.dtype.size for copy in of_replica)
        for of_replica in zip(*copies, strict=True)
    ]
