"""Optimizers by name and parameter groups: which optimizer updates which variable."""

import keras
import pytest
import tensorflow as tf

from ddl.errors import ConfigError
from ddl.optimizers import Group, ParameterGroups
from ddl.optimizers.groups import assign, by_name, from_keras_name, frozen_until, groups_by_name


def sgd(rate=0.1):
    return keras.optimizers.SGD(rate)


def model():
    inputs = keras.Input((4,))
    backbone = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(3, name="a")], name="backbone"
    )
    return keras.Model(inputs, keras.layers.Dense(2, name="head")(backbone(inputs)))


def assigned(**patterns):
    groups = ParameterGroups({n: Group(sgd(), p) for n, p in patterns.items()}).groups
    found = assign(groups, model().trainable_variables)
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
        ({"a": [], "b": None}, "group 'a' has no variables: .* its list is empty"),
        ({"a": ["."], "b": None}, "group 'b' has no variables: other groups name them all"),
        ({"a": None, "b": None}, "a, b both take the variables that no other"),
        ({"a": ["("]}, r"must contain regular expressions, got '\('"),
        ({"a": "head"}, r"must be a list, .*\['head'\]"),
        ({}, "with at least one group"),
        ({"a b": None}, "must be a word"),
        ({"optimizer": None}, "other than 'optimizer'.*got 'optimizer'"),
    ],
)
def test_refuses(patterns, match):
    with pytest.raises(ConfigError, match=match):
        assigned(**patterns)


def test_refuses_what_is_no_group_or_shared():
    with pytest.raises(ConfigError, match="a Group or a Keras optimizer, got 0.1. Pass an inst"):
        ParameterGroups({"a": 0.1})
    shared = sgd()
    with pytest.raises(ConfigError, match="each of a, b needs an optimizer of its own"):
        ParameterGroups({"a": Group(shared, ["x"]), "b": shared})
    with pytest.raises(ConfigError, match="each of g, d needs an optimizer of its own"):
        groups_by_name({"g": ParameterGroups({"a": shared}), "d": shared})


def test_names():
    one, two, three = sgd(), sgd(), sgd()
    groups = ParameterGroups({"a": Group(one, ["a"], frozen_until=7), "b": two})
    assert by_name(groups) == {"a": one, "b": two}
    assert by_name({"g": groups, "d": three}) == {"g/a": one, "g/b": two, "d": three}
    assert frozen_until({"g": groups, "d": three}) == {"g/a": 7, "g/b": 0, "d": 0}
    assert list(groups_by_name(groups)["optimizer"]) == ["a", "b"]


def test_an_optimizer_by_the_name_of_keras():
    strategy = tf.distribute.get_strategy()
    assert type(from_keras_name("adam", strategy)) is keras.optimizers.Adam
    for given, message in (
        ("adma", "the name of one of Keras's, such as 'adam' or 'sgd', got 'adma'"),
        ([keras.optimizers.SGD()], r"got \[<keras.*a dict of instances by the names"),
        (keras.optimizers.Adam, "got <class.*Pass an instance"),
        ({"backbone": "sgd"}, r"Trainer.optimizer\['backbone'\] must be .* got 'sgd'"),
    ):
        with pytest.raises(ConfigError, match=message):
            from_keras_name(given, strategy)
