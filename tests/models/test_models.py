"""Models: numbers of parameters, shapes, what their tokens see, and what they refuse."""

import math

import keras
import numpy as np
import pytest

from ddl import models
from ddl.checkpoints.export import export_model
from ddl.errors import ConfigError
from ddl.precision import set_precision

# A document of three tokens, one of two, and padding.
PACKED = {"segment": np.array([[1, 1, 1, 2, 2, 0]]), "position": np.array([[0, 1, 2, 0, 1, 0]])}


def trainable(model) -> int:
    return sum(math.prod(variable.shape) for variable in model.trainable_variables)


# Counts of BERT-base for masked tokens without vectors of sentences, of GPT-2 small, and
# of the code of torchvision's ResNets.
@pytest.mark.parametrize(
    ("build", "count", "output"),
    [
        (lambda: models.bert(30_522, 512), 109_512_762, (None, 512, 30_522)),
        (lambda: models.gpt(50_257, 1024), 124_439_808, (None, 1024, 50_257)),
        (lambda: models.resnet((224, 224, 3), 1000), 25_557_032, (None, 1000)),
    ],
    ids=["bert", "gpt", "resnet_50"],
)
def test_parameters_and_shapes(build, count, output):
    """Without the memory of the parameters: Keras notes what it would initialize later."""
    with keras.StatelessScope(initialize_variables=False):
        model = build()
    keras.utils.clear_session()  # forgets what it has noted
    assert trainable(model) == count
    assert model.output_shape == output


def test_the_bert_looks_at_all_tokens_of_the_same_document():
    tokens, other = np.array([[1, 2, 3, 4, 5, 6]]), np.array([[1, 2, 3, 9, 5, 6]])
    model = models.bert(16, 6, width=8, heads=2, blocks=2)
    changed = np.abs(model(tokens) - model(other)).max(axis=(0, 2)) > 0
    assert changed.all()
    packed = models.bert(16, 6, width=8, heads=2, blocks=2, packed=True)
    packed.set_weights(model.get_weights())
    whole = {"segment": np.ones((1, 6), int), "position": np.arange(6)[np.newaxis]}
    np.testing.assert_allclose(packed({"token": tokens, **whole}), model(tokens), atol=1e-6)
    difference = packed({"token": tokens, **PACKED}) - packed({"token": other, **PACKED})
    changed = np.abs(difference).max(axis=(0, 2)) > 0
    assert changed.tolist() == [False] * 3 + [True] * 2 + [False]


def test_packed_documents_do_not_see_each_other():
    model = models.gpt(16, 6, width=8, heads=2, blocks=2, packed=True)
    assert trainable(model) == trainable(models.gpt(16, 6, width=8, heads=2, blocks=2))
    tokens, other = np.array([[1, 2, 3, 4, 5, 6]]), np.array([[1, 9, 3, 4, 5, 6]])
    difference = model({"token": tokens, **PACKED}) - model({"token": other, **PACKED})
    changed = np.abs(difference).max(axis=(0, 2)) > 0
    assert changed.tolist() == [False, True, True, False, False, False]


def test_a_model_that_was_exported(tmp_path):
    model = models.gpt(16, 6, width=8, heads=2, blocks=1)
    path, _ = export_model(model, tmp_path / "export")
    tokens = np.array([[1, 2, 3, 4, 5, 6]])
    np.testing.assert_allclose(models.load_exported(path)(tokens), model(tokens), rtol=1e-6)
    with pytest.raises(ConfigError, match="absent.keras does not exist. Export the run"):
        models.load_exported(tmp_path / "absent.keras")
    (tmp_path / "broken.keras").write_text("no archive")
    with pytest.raises(ConfigError, match="broken.keras could not be loaded"):
        models.load_exported(tmp_path / "broken.keras")


def test_numbers_are_scaled_in_the_dtype_of_the_inputs():
    """200 and 200.4 are one number in bfloat16, and 70,000 is too large for float16.

    100,000,000 and 100,000,001 are one number in float32.
    """
    for precision in ("mixed_bfloat16", "mixed_float16"):
        set_precision(precision)
        model = models.table_mlp(2, numbers=1, numbers_mean=[200.0], numbers_deviation=[100.0])
        scaled = model.get_layer("scale")(np.array([[200.0], [200.4], [70_000.0]]))
        np.testing.assert_allclose(scaled, [[0.0], [0.004], [698.0]], atol=1e-5, rtol=1e-5)
    set_precision("float64")
    model = models.table_mlp(2, numbers=1, numbers_mean=[1e8], numbers_deviation=[1.0])
    np.testing.assert_array_equal(model.get_layer("scale")(np.array([[1e8 + 1]])), [[1.0]])
    set_precision("float32")
