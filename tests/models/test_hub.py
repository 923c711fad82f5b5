"""Models of keras-hub, and what is refused. Most tests need the extra keras-hub."""

import importlib.util
import sys

import keras
import numpy as np
import pytest

import ddl
from ddl import models
from ddl.errors import ConfigError
from tests.conftest import make_strategy

GPT2 = {
    "vocabulary_size": 11,
    "num_layers": 1,
    "num_heads": 2,
    "hidden_dim": 8,
    "intermediate_dim": 16,
    "max_sequence_length": 6,
}
RESNET = {
    "input_conv_filters": [64],
    "input_conv_kernel_sizes": [3],
    "stackwise_num_filters": [64],
    "stackwise_num_blocks": [1],
    "stackwise_num_strides": [1],
    "block_type": "basic_block",
    "image_shape": (8, 8, 3),
}


def test_without_keras_hub_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "keras_hub", None)
    with pytest.raises(ConfigError, match="needs keras-hub.*pip install '.\\[keras-hub\\]'"):
        models.keras_hub_model("GPT2CausalLM", backbone=GPT2)


needs_keras_hub = pytest.mark.skipif(
    importlib.util.find_spec("keras_hub") is None, reason="needs the extra keras-hub"
)


def resnet(**arguments):
    return models.keras_hub_model(
        "ResNetImageClassifier", **({"backbone": RESNET, "num_classes": 3} | arguments)
    )


@needs_keras_hub
def test_layers_are_the_same_on_all_replicas():
    model = resnet(dropout=0.5)
    assert model.output_shape == (None, 3)
    found = model._flatten_layers()
    normalizing = [x for x in found if isinstance(x, keras.layers.BatchNormalization)]
    assert normalizing
    assert all(layer.synchronized for layer in normalizing)
    gpt = models.keras_hub_model("GPT2CausalLM", backbone=GPT2)
    assert gpt.output_shape == (None, None, 11)
    dropping = [x for x in gpt._flatten_layers() if isinstance(x, keras.layers.Dropout)]
    assert len(dropping) == 4  # of embeddings, attention weights, attention, perceptron


def trained(make_model, data, task, strategy: str, replicas: int) -> list[np.ndarray]:
    with make_strategy(strategy, replicas).scope():
        keras.utils.set_random_seed(0)
        trainer = ddl.Trainer(
            task(make_model()), keras.optimizers.SGD(0.1), data, global_batch_size=8
        )
    trainer.train(3)
    return [np.array(variable) for variable in trainer.task.model.variables]


def languages():
    tokens = np.random.default_rng(0).integers(0, 11, (19, 7))
    mask = np.arange(6) < np.random.default_rng(1).integers(1, 7, (19, 1))
    data = {"token_ids": tokens[:, :-1], "padding_mask": mask, "next_token": tokens[:, 1:]}
    data["token_weight"] = mask.astype("f4")
    return (
        lambda: models.keras_hub_model("GPT2CausalLM", backbone=GPT2 | {"dropout": 0.5}),
        data,
        lambda model: ddl.LanguageModel(model, input_name="token_ids"),
    )


def images():
    generator = np.random.default_rng(0)
    pixels = generator.normal(size=(19, 8, 8, 3))
    data = {"image": pixels, "label": generator.integers(0, 3, 19)}
    return lambda: resnet(dropout=0.5), data, ddl.Classification


@needs_keras_hub
@pytest.mark.parametrize("case", [languages, images])
def test_two_replicas_make_the_updates_of_one(case):
    ddl.precision.set_precision("float64")
    make_model, data, task = case()
    one = trained(make_model, data, task, "one_device", 1)
    two = trained(make_model, data, task, "mirrored", 2)
    for value, expected in zip(two, one, strict=True):
        np.testing.assert_allclose(value, expected, rtol=0, atol=1e-10)


@needs_keras_hub
def test_weights_of_files_and_of_folders(tmp_path):
    model = resnet()
    model.save_to_preset(str(tmp_path / "preset"))
    model.save_weights(tmp_path / "all.weights.h5")
    values = model.get_weights()
    for other in (
        resnet(weights=str(tmp_path / "all.weights.h5")),
        models.keras_hub_model("ResNetImageClassifier", preset=str(tmp_path / "preset")),
    ):
        for value, expected in zip(other.get_weights(), values, strict=True):
            np.testing.assert_array_equal(value, expected)
    other_head = resnet(backbone=None, preset=str(tmp_path / "preset"), num_classes=5)
    assert other_head.output_shape == (None, 5)
    np.testing.assert_array_equal(other_head.backbone.get_weights()[0], values[0])
    of_backbone = str(tmp_path / "preset" / "model.weights.h5")
    for file, classes in ((str(tmp_path / "all.weights.h5"), 4), (of_backbone, 3)):
        with pytest.raises(ConfigError, match="weights.h5 holds the weights of another model"):
            resnet(weights=file, num_classes=classes)
    with pytest.raises(ConfigError, match="keras-hub cannot build GPT2CausalLM from"):
        models.keras_hub_model("GPT2CausalLM", preset=str(tmp_path / "preset"))
    with pytest.raises(ConfigError, match="has 'classes', but"):
        resnet(backbone=None, preset=str(tmp_path / "preset"), classes=5)


@needs_keras_hub
@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: resnet(backbone=None), "either backbone, .* of ResNetBackbone, .* got neither"),
        (lambda: resnet(preset="here"), "got both"),
        (
            lambda: models.keras_hub_model("ResNetClassifier", backbone=RESNET),
            "got 'ResNetClassifier'. Did you mean",
        ),
        (lambda: resnet(backbone=None, preset="resnet_18_imagenet"), "downloads no presets"),
        (lambda: resnet(backbone={}), "lacks input_conv_filters, .* takes input_conv_filters"),
        (lambda: resnet(backbone=RESNET | {"image_shap": 1}), "Did you mean image_shape"),
        (lambda: resnet(backbone=RESNET | {"block_type": "none"}), "rejects its arguments: .*none"),
        (lambda: resnet(classes=2), "has 'classes', but .* takes backbone, num_classes"),
        (
            lambda: models.keras_hub_model("ResNetImageClassifier", backbone=RESNET),
            "keras_hub_model lacks num_classes",
        ),
        (lambda: resnet(weights="absent.weights.h5"), "absent.weights.h5 does not exist"),
    ],
)
def test_what_is_refused(build, message):
    with pytest.raises(ConfigError, match=message):
        build()
