"""One record of traits for each strategy, which all other modules ask."""

import ast
import operator
import subprocess
import sys
from pathlib import Path

import pytest
import tensorflow as tf

import ddl
from ddl.choices import STRATEGIES
from ddl.distribution.strategies import BUILDERS
from ddl.distribution.traits import TRAITS, strategy_of_cluster, traits_of
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


def test_a_cluster_chooses_a_strategy_of_several_processes():
    assert strategy_of_cluster(1, has_servers=False) is None
    assert TRAITS[strategy_of_cluster(2, has_servers=False)].workers_are_equal
    assert TRAITS[strategy_of_cluster(1, has_servers=True)].asynchronous


def test_traits_need_no_tensorflow():
    program = "import sys, ddl.distribution.traits; sys.exit('tensorflow' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


# ------------------------------------------------------------ who asks


def names_in(node: ast.AST) -> set[str]:
    """Names of strategies among the constants of an expression."""
    return {
        part.value
        for part in ast.walk(node)
        if isinstance(part, ast.Constant) and part.value in NAMES
    }


def classes_in(node: ast.AST) -> set[str]:
    """Strategy classes, other than the base of all, that an expression names."""
    parts = [part for part in ast.walk(node) if isinstance(part, ast.Attribute | ast.Name)]
    names = [ast.unparse(part) for part in parts]
    of_distribute = [name for name in names if "distribute." in name or "." not in name]
    last = {name.rpartition(".")[2] for name in of_distribute}
    return {name for name in last if name.endswith("Strategy") and name != "Strategy"}


def is_question(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return ast.unparse(node.func) in ("isinstance", "issubclass")
    return isinstance(node, ast.Compare | ast.MatchValue)


def asks_by_name_or_type(source: str) -> list[str]:
    """Comparisons with the name of a strategy, and questions for its class."""
    questions = filter(is_question, ast.walk(ast.parse(source)))
    return [ast.unparse(each) for each in questions if names_in(each) or classes_in(each)]


def test_no_other_module_asks_for_the_name_or_the_type_of_a_strategy():
    found = {
        str(path.relative_to(PACKAGE)): asked
        for path in PACKAGE.rglob("*.py")
        if (asked := asks_by_name_or_type(path.read_text()))
    }
    assert not found, found


def test_only_distribution_knows_the_classes():
    knows = {
        path.relative_to(PACKAGE).parts[0]
        for path in PACKAGE.rglob("*.py")
        if classes_in(ast.parse(path.read_text()))
    }
    assert knows == {"distribution"}


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
    assert asks_by_name_or_type(f"if {line}:\n    pass")
