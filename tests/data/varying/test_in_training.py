"""Training on packed rows and on batches by length: any devices, resumed, one trace a bucket."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.checkpoints.checkpoints import Checkpoints
from ddl.checkpoints.directory import Metadata
from ddl.errors import DataError, ModelDirectoryError
from ddl.precision import set_precision
from ddl.training import evaluation
from ddl.training.loop import training_loop as loop
from tests.conftest import make_strategy, save
from tests.data.varying.documents import arrays

pytestmark = pytest.mark.usefixtures("rows_checked_on_one_device")

BOUNDARIES = (4, 8, 12)


class Tokens:
    """Predicts a property of each token from its number; `widths` are those of the traces."""

    def __init__(self):
        token = keras.Input((None,), dtype="int64")
        x = keras.layers.Embedding(50, 3)(keras.ops.mod(token, 50))
        self.model = keras.Model(token, keras.layers.Dense(2)(x))
        self.widths: list[int] = []

    def per_example(self, features, training):
        token = features["token"]
        self.widths.append(token.shape[1])
        logits = self.model(token, training=training)
        loss = tf.nn.sparse_softmax_cross_entropy_with_logits(token // 2 % 2, logits)
        if "token_weight" in features:
            return ddl.PerExample(loss, weight=features["token_weight"])
        mask = tf.sequence_mask(features["length"], token.shape[1], tf.float32)
        return ddl.PerExample(loss, weight=mask)

    def predict(self, features):
        return self.model(features["token"], training=False)


SOURCES = {
    "packed": lambda: ddl.data.packed(arrays(), 16),
    "bucketed": lambda: ddl.data.bucketed(arrays(), BOUNDARIES),
}


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


STEPS = 7  # the buckets of the next batches differ from those of the first ones


@pytest.fixture(scope="module")
def on_one_device():
    trainers = {}
    for name, make in SOURCES.items():
        trainer = trainer_on(make())
        trainer.train(STEPS)
        trainers[name] = trainer, [v.numpy() for v in trainer.model.variables]
    return trainers


@pytest.mark.parametrize("name", SOURCES)
def test_the_same_on_other_devices(name, on_one_device):
    _, expected = on_one_device[name]
    trainer = trainer_on(SOURCES[name](), replicas=2, microbatches=2)
    trainer.train(STEPS)
    for one, two in zip(trainer.model.variables, expected, strict=True):
        np.testing.assert_allclose(one, two, rtol=0, atol=1e-10)


@pytest.mark.usefixtures("gpu_path")
def test_batches_that_tensorflow_distributes_are_cut(on_one_device):
    _, expected = on_one_device["bucketed"]
    trainer = trainer_on(SOURCES["bucketed"](), replicas=2)
    trainer.train(STEPS)
    assert set(trainer.task.widths) == set(BOUNDARIES)
    for one, two in zip(trainer.model.variables, expected, strict=True):
        np.testing.assert_allclose(one, two, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", SOURCES)
def test_resumed_in_an_epoch(name, on_one_device, tmp_path):
    trainer, _ = on_one_device[name]
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
    trainer, _ = on_one_device["packed"]
    save(tmp_path, trainer)
    other = np.random.Generator(np.random.MT19937(0))
    monkeypatch.setattr("numpy.random.default_rng", lambda seed: other)
    monkeypatch.setattr(trainer.pipelines[""], "source", SOURCES["packed"]())
    with pytest.raises(ModelDirectoryError, match=r"(?s)packed rows must.*version of NumPy diff"):
        Checkpoints(tmp_path, trainer).restore_latest()
    (file,) = tmp_path.rglob("step-*.json")
    assert Metadata.from_json(file.read_text()).packing is not None
    earlier = dataclasses.replace(Metadata.from_json(file.read_text()), packing=None)
    file.write_text(earlier.to_json())  # as checkpoints of earlier versions
    Checkpoints(tmp_path, trainer).restore_latest()


def test_one_trace_for_each_bucket_and_the_same_results(monkeypatch, on_one_device):
    trainer, expected = on_one_device["bucketed"]
    assert set(trainer.task.widths) == set(BOUNDARIES)
    evaluated = trainer.evaluate()
    for module in (loop, evaluation):
        monkeypatch.setattr(module, "buckets_of", lambda pipelines: None)
    whole = trainer_on(SOURCES["bucketed"]())
    whole.train(STEPS)
    assert set(whole.task.widths) == {12}
    for one, two in zip(whole.model.variables, expected, strict=True):
        np.testing.assert_allclose(one, two, rtol=0, atol=1e-12)
    assert whole.evaluate() == pytest.approx(evaluated, rel=1e-12)


def test_predictions_in_the_order_of_batches_are_refused(on_one_device):
    trainer, _ = on_one_device["bucketed"]
    with pytest.raises(DataError, match="without bucketed, with features of length 12"):
        trainer.predict(SOURCES["bucketed"]())
