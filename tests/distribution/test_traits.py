"""One record of traits for each strategy, which all other modules ask."""

import operator
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tensorflow as tf

import ddl
from ddl.choices import STRATEGIES
from ddl.distribution.strategies import BUILDERS
from ddl.distribution.traits import TRAITS, traits_of
from tests.conftest import make_strategy

PACKAGE = Path(ddl.__file__).parent
NAMES = sorted({*STRATEGIES} - {"auto"})


@pytest.mark.parametrize("name", NAMES)
def test_every_strategy_has_traits_and_a_builder(name):
    traits = TRAITS[name]
    assert issubclass(operator.attrgetter(traits.class_name)(tf.distribute), tf.distribute.Strategy)
    assert callable(BUILDERS[name])
    assert traits.several_processes or not traits.asynchronous


def test_no_other_names_have_traits_or_builders():
    assert TRAITS.keys() == BUILDERS.keys() == {*NAMES}


@pytest.mark.parametrize(
    ("name", "replicas"), [("one_device", 1), ("mirrored", 2), ("central_storage", 2)]
)
def test_traits_of_a_strategy_are_those_of_its_name(name, replicas):
    assert traits_of(make_strategy(name, replicas)) is TRAITS[name]


def test_the_default_strategy_is_one_device():
    assert traits_of(tf.distribute.get_strategy()) is TRAITS["one_device"]


def test_traits_need_no_tensorflow():
    program = "import sys, ddl.distribution.traits; sys.exit('tensorflow' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


# ------------------------------------------------------------ who asks


QUESTION = re.compile(
    rf"([=!]= |in \(.*|case ).({'|'.join(NAMES)})['\"]|(isinstance|issubclass|type)\(.*\wStrategy\b"
)
"""A comparison with the name of a strategy, or a question for its class."""


def test_no_other_module_asks_for_the_name_or_the_type_of_a_strategy():
    found = {
        str(path.relative_to(PACKAGE)): asked[0]
        for path in PACKAGE.rglob("*.py")
        if (asked := QUESTION.search(path.read_text()))
    }
    assert not found, found


@pytest.mark.parametrize(
    "line",
    [
        "name == 'tpu'",
        "name in ('mirrored', 'tpu')",
        "isinstance(strategy, tf.distribute.TPUStrategy)",
        "isinstance(strategy, _Strategy)",
        "type(strategy) is tf.distribute.MirroredStrategy",
    ],
)
def test_a_question_by_name_or_type_is_seen(line):
    assert QUESTION.search(f"if {line}:")
