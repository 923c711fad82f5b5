"""Memory of a trainer whose optimizer's state is in shares, and optimizers that are refused."""

import keras
import pytest

import ddl
from ddl.errors import ConfigError
from tests.conftest import make_strategy
from tests.step.sharding.trainers import DATA, adamw, assert_close, make, network, slot_bytes


def test_each_replica_holds_its_share_of_the_slots():
    whole = max(slot_bytes(make(make_strategy("one_device", 1), False)))
    of_replicas = slot_bytes(make(make_strategy("mirrored", 4), True))
    assert len(of_replicas) == 4
    assert max(of_replicas) <= 0.27 * whole  # the weights have odd sizes


def test_weights_without_decay_have_none_in_shares():
    kernels = []
    for replicas in (1, 2):
        with make_strategy("mirrored", replicas).scope():
            keras.utils.set_random_seed(0)
            model, optimizer = network(), adamw()
            optimizer.exclude_from_weight_decay(var_list=model.weights[:1])
            given = {"global_batch_size": 16, "shard_optimizer_state": replicas > 1}
            trainer = ddl.Trainer(ddl.Classification(model), optimizer, DATA, **given)
        trainer.train(3, progress=False)
        kernels.append([model.weights[0].numpy()])
    assert_close(*kernels, atol=1e-5)


class Own(keras.optimizers.SGD):
    """An optimizer of which nothing is known."""


OF_KERAS = keras.optimizers.Lamb, keras.optimizers.Adafactor, keras.optimizers.Muon


@pytest.mark.parametrize("optimizer", [ddl.optimizers.LAMB, ddl.optimizers.LARS, *OF_KERAS, Own])
def test_optimizers_that_are_not_known_to_compute_by_entry_are_refused(optimizer):
    name = optimizer.__name__
    with pytest.raises(ConfigError, match=f"elementwise optimizers.*got {name} .*Leave"):
        make(make_strategy("mirrored", 2), True, optimizer)
