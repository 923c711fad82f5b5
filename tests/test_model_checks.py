import keras
import pytest
from absl import logging

import ddl
from ddl.errors import ConfigError
from ddl.model_checks import (
    check_variables,
    computes_in_float16,
    layers_of,
    warn_of_what_depends_on_replicas,
)
from tests.conftest import make_strategy


def test_variables_must_be_there_and_made_in_the_scope():
    strategy = make_strategy("mirrored", 2)
    outside = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    with pytest.raises(ConfigError, match="made outside the strategy's scope"):
        check_variables(outside, strategy)
    outside.trainable = False
    with pytest.raises(ConfigError, match="no trainable variables"):
        check_variables(outside, strategy)
    with strategy.scope():
        inside = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    assert len(check_variables(inside, strategy)) == 2


def test_float16_is_seen():
    assert not computes_in_float16(keras.Sequential([keras.layers.Dense(1)]))
    assert not computes_in_float16(
        keras.Sequential([keras.layers.Dense(1, dtype="mixed_bfloat16")])
    )
    inner = keras.Sequential([keras.layers.Dense(1, dtype="mixed_float16")])
    assert computes_in_float16(keras.Sequential([inner]))


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ([keras.layers.Dropout(0.5, name="drop")], ["drop draw by replica"]),
        ([ddl.layers.Dropout(0.5), ddl.layers.RandomFlip()], []),
        ([keras.layers.BatchNormalization(name="norm")], ["norm take their statistics"]),
        ([keras.layers.BatchNormalization(synchronized=True)], []),
        ([keras.layers.Dense(2)], []),
    ],
    ids=["dropout", "by position", "batch norm", "synchronized batch norm", "dense"],
)
def test_what_depends_on_the_replicas_is_told(layers, words, monkeypatch):
    told = []
    monkeypatch.setattr(logging, "warning", lambda text, *args: told.append(text % args))
    warn_of_what_depends_on_replicas(layers, make_strategy("one_device", 1))
    assert told == []
    warn_of_what_depends_on_replicas(layers, make_strategy("mirrored", 2))
    assert [any(word in text for text in told) for word in words] == [True] * len(words)
    assert len(told) == len(words)


class Holding:
    __slots__ = ("inner",)


class Wrapped(Holding):
    """A task around another, with slots."""

    __slots__ = ("model",)

    def __init__(self, inner):
        self.inner, self.model = inner, inner.model

    def per_example(self, features, training):
        return self.inner.per_example(features, training)


def test_layers_that_the_task_holds_are_found_too():
    flip, noise = keras.layers.RandomFlip(), keras.layers.GaussianNoise(0.1)
    task = ddl.Classification(ddl.models.mlp((6, 6, 1), 2, dropout=0.1), augmentations=[flip])
    task.by_name = {"noise": (noise,), 3: None}
    found = layers_of(task)
    assert flip in found
    assert noise in found
    assert any(isinstance(layer, ddl.layers.Dropout) for layer in found)
    assert set(map(id, found)) <= set(map(id, layers_of(Wrapped(task))))
    assert len({id(layer) for layer in found}) == len(found)
