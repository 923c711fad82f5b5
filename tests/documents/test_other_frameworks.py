"""Statements about Keras and TensorFlow on the pages for their users."""

import ast
import operator
import re

import numpy as np
import pytest
import tensorflow as tf

from tests.conftest import make_strategy
from tests.documents.pages import PAGES, blocks

FROM = [page for page in PAGES if page.name.startswith("from-")]
THEIRS = [block for page in PAGES for block in blocks(page) if block.language == "py"]


def test_code_of_other_frameworks_stands_on_their_pages():
    assert {block.page.name for block in THEIRS} == {
        "from-keras.md",
        "from-orbit.md",
        "from-tensorflow-tutorial.md",
        "keras-scripts.md",
    }


@pytest.mark.parametrize("block", THEIRS, ids=lambda block: block.page.name)
def test_code_of_other_frameworks_parses(block):
    ast.parse(block.text)


@pytest.mark.parametrize("page", FROM, ids=lambda page: page.name)
def test_names_of_tensorflow(page):
    for name in re.findall(r"(?<![\w.])tf\.([A-Za-z][\w.]*\w)", page.read_text()):
        operator.attrgetter(name)(tf)  # raises AttributeError


def test_compute_average_loss_divides_by_the_rows_of_each_replica():
    """Of 3 examples on two replicas, the one alone weighs as much as the other two together."""
    strategy = make_strategy("mirrored", 2)
    losses = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant([[1.0, 1.0], [10.0]][context.replica_id_in_sync_group])
    )
    averages = strategy.run(tf.nn.compute_average_loss, args=(losses,))
    assert strategy.reduce("SUM", averages, axis=None).numpy() == 5.5  # not 12 / 3


def test_draws_of_tensorflow_differ_between_replicas():
    strategy = make_strategy("mirrored", 2)

    @tf.function
    def draw():
        return strategy.experimental_local_results(strategy.run(lambda: tf.random.normal([8])))

    one, other = draw()
    assert not np.array_equal(one, other)
