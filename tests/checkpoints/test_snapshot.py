"""A snapshot is what TensorFlow would save, and stays so while training continues."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.saved_model.registration import register_checkpoint_saver

import ddl
from ddl.checkpoints.snapshot import Snapshots
from ddl.errors import ConfigError
from tests.conftest import for_each_kind_on_two, make_strategy
from tests.training.test_trainer import make_trainer


def checkpoint_of(trainer):
    return tf.train.Checkpoint(model=trainer.model, optimizer=trainer.optimizer)


@for_each_kind_on_two
def test_holds_what_tensorflow_saves_while_training_continues(strategy, tmp_path):
    trainer = make_trainer(strategy)
    trainer.train(2)
    checkpoint = checkpoint_of(trainer)
    reader = tf.train.load_checkpoint(checkpoint.write(str(tmp_path / "theirs")))
    taken = Snapshots(checkpoint).take()
    assert set(taken) == set(reader.get_variable_to_shape_map())
    for name, value in taken.items():
        np.testing.assert_array_equal(value.numpy(), reader.get_tensor(name), err_msg=name)
    trainer.train(3)
    for name, value in taken.items():
        np.testing.assert_array_equal(value.numpy(), reader.get_tensor(name), err_msg=name)


@pytest.mark.parametrize("optimizer", [keras.optimizers.SGD, keras.optimizers.Adam])
def test_stays_so_where_rows_are_updated_in_place(optimizer):
    """Sparse updates write into a variable's memory unless they know that it is shared."""
    strategy = make_strategy("one_device", 1)
    with strategy.scope():
        layers = [keras.layers.Embedding(50, 4), keras.layers.Flatten(), keras.layers.Dense(2)]
        model = keras.Sequential([keras.Input((3,), dtype="int32"), *layers])
        words = np.arange(96).reshape(32, 3) % 50
        data = {"image": words, "label": np.arange(32) % 2}
        trainer = ddl.Trainer(ddl.Classification(model), optimizer(0.1), data, global_batch_size=8)
    trainer.train(1)
    taken = Snapshots(checkpoint_of(trainer)).take()
    before = {name: np.array(value.numpy()) for name, value in taken.items()}
    trainer.train(4)
    table = model.layers[0].embeddings
    assert not any(np.array_equal(table.numpy(), value) for value in before.values())
    for name, value in taken.items():
        np.testing.assert_array_equal(value.numpy(), before[name], err_msg=name)


def test_objects_with_registered_savers_are_refused():
    class Saved(tf.Module):
        """As `register_checkpoint_saver` marks a class, for the rest of the process."""

    register_checkpoint_saver(
        "ddl", "saved", lambda one: isinstance(one, Saved), lambda *_: [], lambda *_: None
    )
    message = "got ddl.saved. Keep their values in attributes that are tf.Variable"
    with pytest.raises(ConfigError, match=message):
        Snapshots(tf.train.Checkpoint(one=Saved()))


def test_the_fused_update_ops_leave_it_as_it_is():
    variable = tf.Variable(np.ones(1000, "f4"))
    taken = Snapshots(tf.train.Checkpoint(x=variable)).take()
    tf.raw_ops.ResourceApplyGradientDescent(
        var=variable.handle, alpha=0.5, delta=tf.ones(1000), use_locking=False
    )
    variable.assign_add(tf.ones(1000))
    (value,) = (value for name, value in taken.items() if name.startswith("x/"))
    np.testing.assert_array_equal(value.numpy(), np.ones(1000, "f4"))


def test_variables_that_tensorflow_wraps_are_listed_once(tmp_path, monkeypatch):
    """A strategy's own variables, such as averages; the mean of the copies if each replica has its
    own value."""
    strategy = make_strategy("mirrored", 2)
    reduced = {
        "synchronization": tf.VariableSynchronization.ON_READ,
        "aggregation": tf.VariableAggregation.MEAN,
    }
    with strategy.scope():
        average, mean = tf.Variable([1.0, 2.0]), tf.Variable([0.0], **reduced)
    for has_reduced, variables in ((False, [average]), (True, [average, mean])):
        checkpoint = tf.train.Checkpoint(variables=variables)
        snapshots = Snapshots(checkpoint)
        average.assign_add([3.0, 4.0])
        for copy, value in zip(strategy.experimental_local_results(mean), (1.0, 4.0), strict=True):
            copy.assign([value])
        reader = tf.train.load_checkpoint(checkpoint.write(str(tmp_path / "theirs")))
        if not has_reduced:
            monkeypatch.setattr(snapshots, "_gather", lambda: pytest.fail("gathered again"))
        taken = snapshots.take()
        assert set(taken) == set(reader.get_variable_to_shape_map())
        for name, value in taken.items():
            np.testing.assert_array_equal(value.numpy(), reader.get_tensor(name), err_msg=name)


def test_takes_tables_too():
    """What is no variable is read anew for each snapshot."""
    table = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, default_value=-1)
    checkpoint = tf.train.Checkpoint(table=table)
    snapshots = Snapshots(checkpoint)
    table.insert(tf.constant(["a"]), tf.constant([7], tf.int64))
    taken = snapshots.take()
    found = [value.numpy().tolist() for name, value in taken.items() if "table" in name]
    assert found in ([[b"a"], [7]], [[7], [b"a"]])
