"""Optimizers by name and parameter groups: which optimizer updates which variable."""

import keras
import pytest

from ddl.errors import ConfigError
from ddl.optimizers import Group, ParameterGroups
from ddl.optimizers.groups import assign


def model():
    inputs, a = keras.Input((4,)), keras.layers.Dense(3, name="a")
    backbone = keras.Sequential([keras.Input((4,)), a], name="backbone")
    return keras.Model(inputs, keras.layers.Dense(2, name="head")(backbone(inputs)))


def assigned(**patterns):
    groups = {name: Group(keras.optimizers.SGD(), of) for name, of in patterns.items()}
    found = assign(ParameterGroups(groups).groups, model().trainable_variables)
    return {name: [v.path for v in own] for name, own in found.items()}


def test_patterns_and_the_rest():
    assert assigned(backbone=["^backbone/"], head=None) == {
        "backbone": ["backbone/a/kernel", "backbone/a/bias"],
        "head": ["head/kernel", "head/bias"],
    }


@pytest.mark.parametrize(
    ("patterns", "match"),
    [
        ({"a": ["^backbone/"]}, "head/kernel belongs to none of the parameter groups a"),
        ({"a": ["kernel"], "b": ["^head/"], "c": None}, "head/kernel belongs to .* a and b"),
        ({"a": ["^back/"], "b": None}, r"group 'a': .*'\^back/' matches none of 4: backbone/a/ker"),
    ],
)
def test_refuses(patterns, match):
    with pytest.raises(ConfigError, match=match):
        assigned(**patterns)
