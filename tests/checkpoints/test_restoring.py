"""Assignment of one value after the other, as for variables on parameter servers."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.checkpoints import restoring
from ddl.checkpoints.checkpoints import Checkpoints
from ddl.checkpoints.comparison import Differences
from ddl.checkpoints.directory import SavedCheckpoint
from ddl.errors import ModelDirectoryError
from tests.conftest import make_strategy, save

CATEGORIES = {"color": 7, "shape": 5}


@pytest.fixture(autouse=True)
def on_servers(monkeypatch):
    monkeypatch.setattr(restoring, "is_on_server", lambda variable: True)


def make_trainer(seed):
    """Returns a trainer, which is never traced, whose weights are drawn from the seed."""
    keras.utils.set_random_seed(seed)
    random = np.random.default_rng(0)
    words = {name: random.integers(0, size, 8) for name, size in CATEGORIES.items()}
    with make_strategy("one_device", 1).scope():
        return ddl.Trainer(
            ddl.Classification(ddl.models.table_mlp(3, categories=CATEGORIES, hidden_units=(4,))),
            keras.optimizers.SGD(0.1),
            {**words, "label": random.integers(0, 3, 8)},
            global_batch_size=4,
            weight_average=ddl.ExponentialMovingAverage(0.5),
        )


def keys_of(prefix):
    return tf.train.load_checkpoint(prefix).get_variable_to_shape_map()


@pytest.mark.parametrize("restore", ["restore_model", "restore_latest"])
def test_a_model_restored_without_its_optimizer_has_all_weights(tmp_path, restore):
    """The file names trained weights by their place in the optimizer, the shortest path."""
    saved, other = make_trainer(1), make_trainer(2)
    for number, average in enumerate(saved.averages.variables):
        average.assign_add(tf.fill(average.shape, float(number)))
    keys = keys_of(save(tmp_path, saved))
    assert any(key.startswith("optimizer/_trainable_variables/") for key in keys)

    getattr(Checkpoints(tmp_path, other), restore)()
    for kind in ("model", "averages"):
        there, here = getattr(saved, kind).variables, getattr(other, kind).variables
        assert there
        for value, reference in zip(here, there, strict=True):
            np.testing.assert_array_equal(value.numpy(), reference.numpy(), err_msg=value.name)


class Words(tf.Module):
    def __init__(self, value, **words):
        super().__init__()
        self.variable = tf.Variable([value])
        self.table = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, -1)
        self.table.insert(tf.constant([*words], tf.string), tf.constant([*words.values()], "int64"))


def test_restores_tables_of_words_too(tmp_path):
    """As TensorFlow does, also those that were saved under another path."""
    saved, here = Words(1.0, a=3, b=5), Words(2.0, c=1)
    at = tf.train.Checkpoint(first=saved, model={"words": saved}).write(str(tmp_path / "saved"))
    assert any(key.startswith("first/table/") for key in keys_of(at))
    checkpoint = tf.train.Checkpoint(model={"words": here})
    restoring.assign(checkpoint, SavedCheckpoint(0, at), partial=["first"])
    np.testing.assert_array_equal(here.variable, [1])
    np.testing.assert_array_equal(here.table.lookup(tf.constant(["a", "b", "c"])), [3, 5, -1])


@pytest.mark.parametrize("lacks", ["the path", "the value"])
def test_assigns_nothing_if_a_value_is_missing(tmp_path, monkeypatch, lacks):
    """Even if the comparison did not say so."""
    monkeypatch.setattr(restoring, "compare", lambda *_: Differences((), (), ()))
    at = tf.train.Checkpoint(first=tf.Variable(1.0), last=tf.Variable(1.0)).write(
        str(tmp_path / "saved")
    )
    here = {"first": tf.Variable(2.0), "other" if lacks == "the path" else "last": tf.Variable(3.0)}
    if lacks == "the value":
        reader = tf.train.load_checkpoint(at)

        class Cut:
            get_tensor = staticmethod(reader.get_tensor)

            def has_tensor(self, key):
                return not key.startswith("last") and reader.has_tensor(key)

        monkeypatch.setattr(restoring.tf.train, "load_checkpoint", lambda _: Cut())
    message = rf"it lacks values for {[*here][1]}/\.ATTRIBUTES/VARIABLE_VALUE\. Pass another"
    with pytest.raises(ModelDirectoryError, match=message):
        restoring.assign(tf.train.Checkpoint(**here), SavedCheckpoint(0, at))
    assert [value.numpy() for value in here.values()] == [2, 3]
