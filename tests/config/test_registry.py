"""What configs can name: ddl's own items and those of Keras."""

import keras
import pytest

import ddl
from ddl.config import registry


@pytest.mark.parametrize(
    ("name", "item"),
    [
        ("SGD", keras.optimizers.SGD),
        ("keras.losses.Huber", keras.losses.Huber),
        ("CosineDecay", keras.optimizers.schedules.CosineDecay),
        ("keras.layers.Dense", keras.layers.Dense),
        ("ddl.layers.CutMix", ddl.layers.CutMix),
        ("ddl.Trainer", ddl.Trainer),
        ("mlp", ddl.models.mlp),
    ],
)
def test_names(monkeypatch, name, item):
    monkeypatch.undo()
    registry.register_all()
    assert [one.wrapped for one in registry.matches(name)] == [item]
