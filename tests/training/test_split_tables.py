"""Training with a table in several parts, against one table."""

import keras
import pytest
import tensorflow as tf

from ddl.errors import DataError
from tests.conftest import make_strategy
from tests.training import split_tables


@pytest.mark.parametrize(
    ("optimizer", "where", "arguments"),
    [
        ("Adagrad", ("mirrored", 2), {"clip_norm": 1e9}),
        ("SGD", ("one_device", 1), {"accumulation_steps": 2}),
    ],
)
def test_parts_train_what_one_table_does(optimizer, where, arguments):
    whole = split_tables.make_trainer(make_strategy("one_device", 1), 0, optimizer)
    expected = split_tables.results(whole, 0)
    trainer = split_tables.make_trainer(make_strategy(*where), 4, optimizer, **arguments)
    found = split_tables.results(trainer, 4)
    assert "slots" in found or optimizer == "SGD"
    for name, difference in split_tables.largest(found, expected).items():
        assert difference <= 1e-10, name


def test_the_gradient_of_each_part_is_sparse():
    trainer = split_tables.make_trainer(make_strategy("one_device", 1), 4)
    layer = trainer.model.get_layer("table")
    (objective,) = trainer._update.plan.losses.values()
    found = [objective.training.tables.get(id(table.value.handle)) for table in layer.tables]
    assert [each.as_a_whole for each in found if each is not None] == [False] * 4


def test_an_id_that_the_table_lacks_is_named():
    """In arrays when the trainer is built, in a stream by the update."""
    strategy, words = make_strategy("one_device", 1), split_tables.data()
    words["words"][7, 2] = split_tables.ROWS
    with pytest.raises(DataError, match="must be from 0 to 102, got 0 to 103 .first in example 7"):
        split_tables.make_trainer(strategy, 4, train_data=words)
    stream = tf.data.Dataset.from_tensor_slices(words)
    trainer = split_tables.make_trainer(strategy, 4, train_data=stream)
    with pytest.raises(DataError, match=r"indices = 103 is not in \[0, 103\)"):
        trainer.train(5)


def test_initial_vectors_of_parts_are_those_of_the_seed():
    keras.utils.set_random_seed(1)
    first = split_tables.task(4).model.get_layer("table").whole()
    keras.utils.set_random_seed(1)
    assert (split_tables.task(4).model.get_layer("table").whole() == first).all()
