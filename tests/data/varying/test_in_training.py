"""Training on packed rows: any devices, resumed."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.checkpoints.checkpoints import Checkpoints
from ddl.checkpoints.directory import Metadata
from ddl.errors import ModelDirectoryError
from ddl.precision import set_precision
from tests.conftest import make_strategy, save
from tests.data.varying.documents import arrays

pytestmark = pytest.mark.usefixtures("rows_checked_on_one_device")


class Tokens:
    """Predicts a property of each token from its number."""

    def __init__(self):
        token = keras.Input((None,), dtype="int64")
        x = keras.layers.Embedding(50, 3)(keras.ops.mod(token, 50))
        self.model = keras.Model(token, keras.layers.Dense(2)(x))

    def per_example(self, features, training):
        token = features["token"]
        logits = self.model(token, training=training)
        loss = tf.nn.sparse_softmax_cross_entropy_with_logits(token // 2 % 2, logits)
        return ddl.PerExample(loss, weight=features["token_weight"])


def packed():
    return ddl.data.packed(arrays(), 16)


def trainer_on(source, replicas=1, microbatches=1):
    set_precision("float64")
    keras.utils.set_random_seed(0)
    strategy = make_strategy("mirrored" if replicas > 1 else "one_device", replicas)
    with strategy.scope():
        return ddl.Trainer(
            Tokens(),
            keras.optimizers.SGD(0.1, momentum=0.9),
            source,
            eval_data=source,
            global_batch_size=4,
            accumulation_steps=microbatches,
            strategy=strategy,
        )


STEPS = 7


@pytest.fixture(scope="module")
def on_one_device():
    trainer = trainer_on(packed())
    trainer.train(STEPS)
    return trainer, [v.numpy() for v in trainer.model.variables]


def test_the_same_on_other_devices(on_one_device):
    _, expected = on_one_device
    trainer = trainer_on(packed(), replicas=2, microbatches=2)
    trainer.train(STEPS)
    for one, two in zip(trainer.model.variables, expected, strict=True):
        np.testing.assert_allclose(one, two, rtol=0, atol=1e-10)


def test_resumed_in_an_epoch(on_one_device, tmp_path):
    trainer, _ = on_one_device
    save(tmp_path, trainer)
    trainer.train(4)
    expected = [v.numpy() for v in trainer.model.variables]
    Checkpoints(tmp_path, trainer).restore_latest()
    trainer.train(4)
    for one, two in zip(trainer.model.variables, expected, strict=True):
        np.testing.assert_array_equal(one, two)
    Checkpoints(tmp_path, trainer).restore_latest()


def test_a_resume_with_other_rows_is_refused(on_one_device, tmp_path, monkeypatch):
    """NumPy does not promise the numbers that decide about the rows across its versions."""
    trainer, _ = on_one_device
    save(tmp_path, trainer)
    other = np.random.Generator(np.random.MT19937(0))
    monkeypatch.setattr("numpy.random.default_rng", lambda seed: other)
    monkeypatch.setattr(trainer.pipelines[""], "source", packed())
    with pytest.raises(ModelDirectoryError, match=r"(?s)packed rows must.*version of NumPy diff"):
        Checkpoints(tmp_path, trainer).restore_latest()
    (file,) = tmp_path.rglob("step-*.json")
    assert Metadata.from_json(file.read_text()).packing is not None
    earlier = dataclasses.replace(Metadata.from_json(file.read_text()), packing=None)
    file.write_text(earlier.to_json())  # as checkpoints of earlier versions
    Checkpoints(tmp_path, trainer).restore_latest()
