"""Models of keras.applications and keras-hub, which a config names as Keras does."""

import importlib.util

import gin
import numpy as np
import pytest

from ddl import config, data
from ddl.distribution.workers import Workers
from ddl.run import train
from tests.conftest import make_strategy

needs_keras_hub = pytest.mark.skipif(
    importlib.util.find_spec("keras_hub") is None, reason="needs the extra keras-hub"
)

STANDARD = """
include 'standard.gin'
SEED = 3
GLOBAL_BATCH_SIZE = 4
TRAIN_STEPS = 3
Trainer.task = @Classification()
Trainer.optimizer = @SGD()
SGD.learning_rate = 0.1
"""
MOBILE_NET = """
Trainer.train_data = @synthetic()
synthetic.features = {'image': ((32, 32, 3), 'uint8'), 'label': ((), 'int64')}
synthetic.num_examples = 9
synthetic.seed = 1
Classification.model = @keras.applications.MobileNet()
MobileNet.input_shape = (32, 32, 3)
MobileNet.alpha = 0.1
MobileNet.weights = None
MobileNet.classes = 128
MobileNet.classifier_activation = None
"""
BERT = """
Trainer.train_data = @sentences()
Classification.model = @keras_hub.models.BertTextClassifier()
BertTextClassifier.backbone = @keras_hub.models.BertBackbone()
BertTextClassifier.num_classes = 2
BertTextClassifier.dropout = 0.2
BertBackbone.vocabulary_size = 11
BertBackbone.num_layers = 1
BertBackbone.num_heads = 2
BertBackbone.hidden_dim = 8
BertBackbone.intermediate_dim = 16
BertBackbone.max_sequence_length = 6
BertBackbone.dropout = 0.2
"""


@gin.register(module="tests")
def sentences():
    """Returns sentences of 6 tokens, some of them padding."""
    generator = np.random.default_rng(0)
    tokens = generator.integers(1, 11, (9, 6))
    features = {"token_ids": tokens, "segment_ids": 0 * tokens, "label": tokens[:, 0] % 2}
    lengths = generator.integers(1, 7, (9, 1))
    return data.Source({**features, "padding_mask": np.arange(6) < lengths})


def trainer_of(tmp_path, *texts):
    (tmp_path / "model.gin").write_text("".join(texts))
    config.load([str(tmp_path / "model.gin")])
    placement = train.Placement(make_strategy("one_device", 1))
    _, trainer = train.build(placement, Workers(placement.strategy))
    return trainer


def moved(trainer) -> set[str]:
    """Returns the paths of the weights that three updates change, which may not be infinite."""
    model = trainer.task.model
    before = model.get_weights()
    trainer.train(3, progress=False)
    assert all(np.isfinite(value).all() for value in model.get_weights())
    pairs = zip(model.weights, before, strict=True)
    return {one.path for one, value in pairs if not np.array_equal(one, value)}


def test_an_application_of_keras_trains(tmp_path):
    trainer = trainer_of(tmp_path, STANDARD, MOBILE_NET)
    assert {"conv1/kernel", "conv1_bn/moving_mean"} <= moved(trainer)
    config.check_all_used()


@needs_keras_hub
def test_a_bert_of_keras_hub_trains(tmp_path):
    trainer = trainer_of(tmp_path, "import keras_hub", STANDARD, BERT)
    assert len(moved(trainer)) > 20
    config.check_all_used()
    assert config.operative_config_text().startswith("import keras_hub\n")
