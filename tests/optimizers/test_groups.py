"""Parameter groups: which optimizer updates which variable."""

import keras
import pytest

from ddl.errors import ConfigError
from ddl.optimizers import Group, ParameterGroups
from ddl.optimizers.groups import assign, by_name, frozen_until, groups_by_name


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
        ({"a": ["^back/"], "b": None}, r"'\^back/' of the parameter group 'a' matches no trained"),
        # The pattern is wrong, so the variable in no group is no news.
        (
            {"a": ["^backbon/"], "b": ["^head/"]},
            r"(?s)'\^backbon/' of .*'a' matches .*Did you mean backbone\?\n.* are backbone/a/ker",
        ),
        ({"a": ["^heads/"], "b": ["."], "c": ["^head"]}, r"'\^heads/' of the parameter group 'a'"),
        ({"a": ["x1"], "b": ["x2"]}, r"(?s)'x1' of .* 'a' .*\n.*'x2' of .* 'b' .*\nThe trained"),
        ({"a": [], "b": None}, "group 'a' must have at least one pattern, or be None.*empty list"),
        ({"a": ["."], "b": None}, "group 'b' has no variables"),
        ({"a": None, "b": None}, "a, b both take the variables that no other"),
        ({"a": ["("]}, r"must contain regular expressions, got '\('"),
        ({"a": "head"}, r"must be a list of patterns.*\['head'\]"),
        ({}, "with at least one group"),
        ({"a b": None}, "must be a word"),
        ({"optimizer": None}, "'optimizer' cannot be the name"),
    ],
)
def test_refuses(patterns, match):
    with pytest.raises(ConfigError, match=match):
        assigned(**patterns)


@pytest.mark.parametrize("frozen_until", [-1, 1.5])
def test_refuses_a_step_that_is_none(frozen_until):
    with pytest.raises(ConfigError, match="frozen_until must be an integer of at least 0"):
        Group(sgd(), frozen_until=frozen_until)


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
    assert {name: list(own) for name, own in groups_by_name(groups).items()} == {
        "optimizer": ["a", "b"]
    }
