import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.checkpoints import Checkpoints
from ddl.errors import ModelDirectoryError
from tests.conftest import make_strategy
from tests.test_trainer import DATA, make_trainer, weights_and_slots


def assert_equal(one, other, atol=0.0):
    for value, reference in zip(weights_and_slots(one), weights_and_slots(other), strict=True):
        np.testing.assert_allclose(value, reference, rtol=0, atol=atol)


def test_goes_on_where_it_was_in_the_middle_of_an_epoch(tmp_path):
    straight = make_trainer(make_strategy("mirrored", 2), clip_norm=0.1)
    metrics = straight.train(12)

    first = make_trainer(make_strategy("mirrored", 2), clip_norm=0.1)
    first.train(7)
    Checkpoints(tmp_path, first).save()

    second = make_trainer(make_strategy("mirrored", 2), clip_norm=0.1)
    assert Checkpoints(tmp_path, second).restore_latest()
    assert second.step == 7
    second.train(5)
    assert_equal(second, straight)
    assert second.evaluate() == straight.evaluate()
    assert metrics["loss"] > 0


@pytest.mark.parametrize("layer", [ddl.layers.Dropout, keras.layers.Dropout])
def test_what_is_drawn_at_random_goes_on_too(tmp_path, layer):
    def trainer(seed):
        keras.utils.set_random_seed(seed)
        strategy = make_strategy("mirrored", 2)
        with strategy.scope():
            layers = [keras.layers.Flatten(), layer(0.5), keras.layers.Dense(2)]
            model = keras.Sequential([keras.Input((6, 6, 1)), *layers])
            task = ddl.Classification(model, augmentations=[ddl.layers.RandomShift(1, 1)])
            return ddl.Trainer(task, keras.optimizers.SGD(1e-3), DATA, global_batch_size=32)

    first, second = trainer(1), trainer(2)  # another seed: what counts is in the checkpoint
    first.train(3)
    Checkpoints(tmp_path, first).save()
    Checkpoints(tmp_path, second).restore_latest()
    assert first.train(4) == second.train(4)
    assert_equal(first, second)


def test_metrics_since_the_last_log_are_saved(tmp_path):
    straight = make_trainer(make_strategy("one_device", 1))
    straight._run_loop(3)
    first = make_trainer(make_strategy("one_device", 1))
    first._run_loop(3)
    Checkpoints(tmp_path, first).save()
    second = make_trainer(make_strategy("one_device", 1))
    Checkpoints(tmp_path, second).restore_latest()
    assert second.train(4) == straight.train(4)


@pytest.mark.parametrize(("name", "replicas"), [("one_device", 1), ("central_storage", 4)])
def test_goes_on_under_another_strategy(tmp_path, name, replicas):
    straight = make_trainer(make_strategy("mirrored", 2))
    straight.train(12)
    first = make_trainer(make_strategy("mirrored", 2))
    first.train(7)
    Checkpoints(tmp_path, first).save()
    second = make_trainer(make_strategy(name, replicas))
    Checkpoints(tmp_path, second).restore_latest()
    second.train(5)
    assert_equal(second, straight, atol=1e-10)


def test_the_loss_scale_is_saved(tmp_path):
    first = make_trainer(make_strategy("mirrored", 2), precision="mixed_float16")
    first.train(1)
    first.state = first.state._replace(loss_scale=tf.constant(64.0))
    Checkpoints(tmp_path, first).save()
    second = make_trainer(make_strategy("mirrored", 2), precision="mixed_float16")
    Checkpoints(tmp_path, second).restore_latest()
    assert second.loss_scale == 64.0


def test_checkpoints_of_all_strategies_hold_the_same_tensors(tmp_path):
    held = []
    for name, replicas in [("one_device", 1), ("mirrored", 4), ("central_storage", 2)]:
        trainer = make_trainer(make_strategy(name, replicas))
        trainer.train(2)
        path = Checkpoints(tmp_path / name, trainer).save()
        held.append(tf.train.load_checkpoint(path).get_variable_to_shape_map())
    assert held[0] == held[1] == held[2]
    assert any("state/step" in name for name in held[0])


def test_keeps_the_latest(tmp_path):
    trainer = make_trainer(make_strategy("one_device", 1))
    checkpoints = Checkpoints(tmp_path, trainer, keep=2)
    for _ in range(3):
        trainer.train(1)
        checkpoints.save()
    assert sorted(path.name for path in tmp_path.glob("*.index")) == [
        "step-2.index",
        "step-3.index",
    ]


def test_nothing_to_restore(tmp_path):
    checkpoints = Checkpoints(tmp_path / "none", make_trainer(make_strategy("one_device", 1)))
    assert not checkpoints.restore_latest()
    assert not (tmp_path / "none").exists()


def test_a_checkpoint_of_another_model(tmp_path):
    trainer = make_trainer(make_strategy("one_device", 1))
    Checkpoints(tmp_path, trainer).save()
    other = make_trainer(make_strategy("one_device", 1), precision="float32")
    with pytest.raises(ModelDirectoryError, match=r"step-0 cannot be restored"):
        Checkpoints(tmp_path, other).restore_latest()
