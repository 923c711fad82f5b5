import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.data import EndlessSource, as_source, endless
from ddl.data.checks import data_errors
from ddl.errors import ConfigError, DataError
from tests.data.test_records import taken

COUNT = 11


def numbers():
    for number in range(COUNT):
        yield {"x": np.float32(number), "name": str(number)}


def from_start(start):
    for number in itertools.count(start):
        yield {"x": np.float32(number % COUNT)}


def dataset():
    return tf.data.Dataset.range(COUNT).map(lambda n: {"x": tf.cast(n, tf.float32)})


SOURCES = {
    "generator": lambda: endless(numbers, steps_per_epoch=3),
    "from a start": lambda: endless(from_start, steps_per_epoch=3),
    "data set": lambda: endless(dataset().filter(lambda e: e["x"] >= 0), steps_per_epoch=3),
    "function": lambda: endless(dataset, steps_per_epoch=3),
    "from a start, data set": lambda: endless(
        lambda start: dataset().repeat().skip(start), steps_per_epoch=3
    ),
}


@pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES)
def test_batches_go_on_over_the_end_and_any_batch_is_found(make):
    source = make()
    straight = taken(source, 8)
    found = np.concatenate([batch["x"] for batch in straight])
    np.testing.assert_array_equal(found, np.arange(32) % COUNT)
    assert all((batch["weight"] == 1).all() for batch in straight)
    rows = np.array([2, 0])
    for whole, part in zip(straight[5:], taken(source, 3, first=5, rows=rows), strict=True):
        np.testing.assert_array_equal(part["x"], whole["x"][rows])
    assert source.steps_per_epoch(4) == 3
    assert source.examples_per_epoch(4) == 12
    assert ddl.data.BatchPipeline(source, 4).always_full


def test_a_function_of_the_start_reads_nothing_before_it():
    read = []

    def examples(start):
        for number in itertools.count(start):
            read.append(number)
            yield {"x": np.float32(number)}

    source = endless(examples, steps_per_epoch=3)
    read.clear()
    taken(source, 2, first=1000)
    assert min(read) == 4000


def test_numbers_of_python_and_text():
    def examples():
        yield {"a": 1, "b": 0.5, "c": "é", "d": [b"x\0", b""], "e": True, "f": np.float64(1)}

    source = endless(examples, steps_per_epoch=1)
    dtypes = {name: spec.dtype.name for name, spec in source.element_spec.items()}
    assert dtypes == {
        **{"a": "int64", "b": "float32", "c": "string", "d": "string", "e": "bool"},
        **{"f": "float64"},
    }
    (batch,) = taken(source, 1, batch=2)
    assert batch["c"].tolist() == ["é".encode()] * 2
    assert batch["d"].tolist() == [[b"x\0", b""]] * 2


def unseeded():
    return dataset().shuffle(COUNT)


def drawn():
    yield from ({"x": np.random.default_rng().random()} for _ in range(COUNT))


def ignores_the_start(start):
    yield from from_start(0)


def ends(start):
    yield from itertools.islice(from_start(start), 20)


def of_other_shape():
    yield {"x": np.zeros(2)}
    yield {"x": np.zeros(3)}


def of_other_dtype():
    yield {"x": 1}
    yield {"x": 1.5}


def of_other_names():
    yield {"x": 1}
    yield {"y": 1}


def fails():
    yield {"x": 1}
    raise KeyError("file 7")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (unseeded, "Two reads of .*unseeded differ, first in example .*Seed what is random"),
        (dataset().shuffle(COUNT, seed=1), "Two reads of the tf.data.Dataset differ"),
        (drawn, "Two reads of .*drawn differ, first in example 0"),
        (ignores_the_start, "another example for start = 16"),
        (ends, "ended after 20 examples from start = 0. A function with"),
        (of_other_shape, r"'x' of example 1 of .*of_other_shape must be float64 of shape \(2,\)"),
        (of_other_dtype, "'x' of example 1 of .* must be int64 of shape .*, got float32"),
        (of_other_names, "example 1 of .* must have the features of the first example, x, got y"),
        (lambda: iter(()), "must yield at least one example, got none. Correct"),
        (lambda: dataset().take(0), "ended after 0 examples.* else correct what it reads"),
        (numbers(), "must be a tf.data.Dataset, .*, got generator. An iterator can be read only"),
        ([1, 2], "got list"),
        (lambda: [3], r"must be a dict of features by name, or a tuple \(x, y\) .*, got 3"),
        (lambda: [{"x": None}], "must be numbers or text of one shape, got None"),
        (lambda: [{"x": [[1], [1, 2]]}], "must be numbers or text of one shape, .* Pad rows"),
        (dataset().batch(2), "must yield single examples, but it yields batches of 2 rows"),
    ],
)
def test_what_is_found_at_the_start(data, message):
    with pytest.raises(DataError, match=f"(?s){message}"):
        EndlessSource(data, 3)


def test_what_fails_later_names_the_example():
    def later():
        yield from itertools.islice(numbers(), 40)
        for number in range(40):
            yield {"x": np.float32(number), "name": "n"}
        yield {"x": np.float32(np.nan), "name": "n"}
        yield {"x": np.zeros(2, np.float32), "name": "n"}

    source = endless(later, steps_per_epoch=3)
    with pytest.raises(DataError, match="'x' contains NaN"), data_errors():
        taken(source, 13, batch=4)
    with pytest.raises(DataError, match="of example 52 of .*later must be float32"), data_errors():
        taken(source, 1, first=52, batch=1)


def test_an_end_after_a_start_is_an_error_and_no_end_of_training():
    source = endless(lambda start: dataset().repeat(8).skip(start), steps_per_epoch=3)
    with (
        pytest.raises(DataError, match="ended after 88 examples. .* dataset.repeat"),
        data_errors(),
    ):
        taken(source, 30, batch=4)


@pytest.mark.parametrize("steps", [None, 0])
def test_without_a_length_of_the_epoch(steps):
    for data in (numbers, dataset):
        with pytest.raises(ConfigError, match="Set STEPS_PER_EPOCH in the config"):
            endless(data, steps_per_epoch=steps)
    with pytest.raises(DataError, match=r"Call examples_per_epoch\(global_batch_size\)"):
        len(endless(numbers, steps_per_epoch=1))


def test_a_data_set_of_unknown_length_names_the_way():
    with pytest.raises(DataError, match="or use ddl.data.endless"):
        as_source(dataset().filter(lambda e: e["x"] > 1))


def test_each_evaluation_reads_the_same(tmp_path):
    def regression(start):
        for number in itertools.count(start):
            yield np.float32([number]), np.float32(number % 7)

    data = endless(regression, steps_per_epoch=2)
    task = ddl.Supervised(keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)]), "mse")
    trainer = ddl.Trainer(
        task, keras.optimizers.SGD(1e-4), data, global_batch_size=4, eval_data=data
    )
    first = trainer.evaluate()
    assert trainer.evaluate() == first


def test_a_generator_that_fills_one_array_may_begin_anywhere():
    """The examples of two reads are compared as they were read."""

    def counting(start=0):
        x = np.zeros(2, np.float32)
        for number in itertools.count(start):
            x[:] = number
            yield {"x": x}

    (batch,) = taken(endless(counting, steps_per_epoch=2), 1, first=5, batch=3)
    assert batch["x"][:, 0].tolist() == [15, 16, 17]


def test_a_generator_may_fill_one_array_for_all_examples():
    """The rows of a batch would all be the last example, if they were kept until it is full."""

    def counting():
        x = np.zeros(2, np.float32)
        for number in range(6):
            x[:] = number
            yield {"x": x, "name": f"n{number}"}

    source = endless(counting, steps_per_epoch=2)
    whole = taken(source, 3, batch=4)
    assert [batch["x"][:, 0].tolist() for batch in whole] == [
        [0, 1, 2, 3],
        [4, 5, 0, 1],
        [2, 3, 4, 5],
    ]
    assert whole[1]["name"].tolist() == [b"n4", b"n5", b"n0", b"n1"]
    (part,) = taken(source, 1, first=1, batch=4, rows=np.array([3, 0]))
    assert part["x"][:, 1].tolist() == [1, 4]
