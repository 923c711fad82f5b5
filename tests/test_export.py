"""What an export needs to be loaded: Keras alone."""

import json
import zipfile

import keras
import numpy as np
import pytest

import ddl
from ddl import optimizers
from ddl.export import export_model


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad"])
def test_a_model_compiled_with_a_fused_optimizer_needs_keras_alone(tmp_path, name):
    model = ddl.models.mlp((2, 2, 1), 3, hidden_units=(4,), dropout=0.5)
    optimizer = getattr(optimizers, f"Fused{name}")(0.25, weight_decay=0.5)
    model.compile(optimizer, "sparse_categorical_crossentropy")
    optimizer.build(model.trainable_variables)
    optimizer.apply([v.value for v in model.trainable_variables])
    path, _ = export_model(model, tmp_path / "export")
    with zipfile.ZipFile(path) as file:
        assert "ddl" not in json.dumps(json.loads(file.read("config.json")))
    loaded = keras.models.load_model(path)
    assert type(loaded.optimizer) is getattr(keras.optimizers, name)
    assert loaded.optimizer.get_config() == optimizer.get_config()
    for one, other in zip(loaded.optimizer.variables, optimizer.variables, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())
