"""A user's pipeline as it is: every form gives the batches of the same examples."""

import gc
import sys
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

from ddl.data import BatchPipeline
from ddl.data.stream import stream
from ddl.errors import ConfigError, DataError
from tests.conftest import make_strategy

N = 11
X = np.arange(2 * N, dtype=np.float32).reshape(N, 2)
Y = np.arange(N)


def examples(count=N):
    return tf.data.Dataset.from_tensor_slices((X[:count], Y[:count]))


def one_by_one():
    yield from zip(X, Y, strict=True)


def in_fours():
    for start in range(0, N, 4):
        yield {"image": X[start : start + 4], "label": Y[start : start + 4]}


class Batches(keras.utils.PyDataset):
    """Batches of 3, which the end of an epoch shifts by 100."""

    shift = 0

    def __len__(self):
        return 4

    def __getitem__(self, number):
        rows = slice(3 * number, 3 * number + 3)
        return X[rows] + self.shift, Y[rows] + self.shift

    def on_epoch_end(self):
        self.shift += 100


def labels(data, size, first=0, count=6, rows=None):
    """Returns the labels of batches, with -1 for padding."""
    found = stream(data) if not hasattr(data, "batches") else data
    batches = found.batches(size, first, rows)
    assert batches.cardinality() == tf.data.INFINITE_CARDINALITY
    assert all(spec.shape.is_fully_defined() for spec in batches.element_spec.values())
    read = list(batches.take(count).as_numpy_iterator())
    return [np.where(one["weight"] > 0, one["label"], -1).tolist() for one in read]


PASS = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, -1]]
KNOWN = {
    "examples": examples,
    "batches": lambda: examples().batch(3),
    "batches of no rest": lambda: examples().batch(11, drop_remainder=True),
    "padded batches": lambda: examples().padded_batch(5).map(lambda x, y: (x, y)).prefetch(2),
    "batches whose shape is given later": lambda: (
        examples()
        .batch(11)
        .map(lambda x, y: (tf.ensure_shape(x, [11, 2]), y))
        .map(lambda x, y: (x, tf.ensure_shape(y, [11])))
    ),
    "a function": lambda: lambda: examples().batch(2),
}
UNKNOWN = {
    "filtered batches": lambda: examples().batch(3).filter(lambda x, y: True),
    "batches again": lambda: examples().batch(3).rebatch(2),
    "a choice among batches": lambda: tf.data.Dataset.choose_from_datasets(
        [examples().batch(4), examples().batch(4)],
        tf.data.Dataset.from_tensors(np.int64(1)).repeat(3),
    ),
    "batches of from_generator": lambda: tf.data.Dataset.from_generator(
        in_fours,
        output_signature={
            "image": tf.TensorSpec([None, 2]),
            "label": tf.TensorSpec([None], tf.int64),
        },
    ),
    "a PyDataset": lambda: type("Still", (Batches,), {"on_epoch_end": lambda self: None})(),
    "a generator": lambda: one_by_one,
    "a generator of batches": lambda: stream(in_fours, batched=True),
}


@pytest.mark.parametrize("make", [*KNOWN.values(), *UNKNOWN.values()], ids=[*KNOWN, *UNKNOWN])
def test_each_pass_holds_each_example_once_in_order(make):
    found = make()
    found = found if hasattr(found, "batches") else stream(found)
    assert {name: (spec.shape, spec.dtype) for name, spec in found.element_spec.items()} == {
        "image": ([2], tf.float32),
        "label": ([], tf.int64),
    }
    assert labels(found, 4) == PASS + PASS
    assert found.num_examples == (N if make in KNOWN.values() else None)
    assert not found.is_endless
    assert found.is_repeatable


@pytest.mark.parametrize("name", ["filtered batches", "a PyDataset", "a generator"])
def test_an_unknown_length_is_counted(name):
    found = stream(UNKNOWN[name]())
    assert found.num_examples is None
    assert found.count() == found.num_examples == N
    assert labels(found, 4, 3, 3) == PASS


def epochs(epoch):
    return examples().map(lambda x, y: (x, y + 100 * epoch))


def generated(epoch):
    assert isinstance(epoch, int)
    return ({"label": y + 100 * epoch} for y in Y)


@pytest.mark.parametrize(
    "make", [lambda: epochs, lambda: generated, Batches, lambda: examples().repeat(3)]
)
@pytest.mark.parametrize("first", [1, 7])
def test_a_run_resumes_at_any_batch(make, first):
    whole = labels(make(), 4, 0, first + 3)
    assert labels(make(), 4, first, 3) == whole[first:]


def test_a_function_of_the_epoch_makes_each_pass():
    for make in (epochs, generated, Batches()):
        second = [[100, 101, 102, 103], [104, 105, 106, 107], [108, 109, 110, -1]]
        assert labels(make, 4) == PASS + second


def test_whole_passes_are_not_read_again():
    made = []

    def counted(epoch):
        made.append(epoch)
        return epochs(epoch)

    found = stream(counted)
    made.clear()
    assert labels(found, 4, 3 * 1000 + 1, 1) == [[100_004, 100_005, 100_006, 100_007]]
    assert min(made) == 1000


def test_endless_data_are_never_padded():
    for data in (examples().repeat(), examples().batch(3).repeat()):
        found = stream(data)
        assert found.is_endless
        assert found.num_examples is None
        assert labels(found, 4, 2, 2) == [[8, 9, 10, 0], [1, 2, 3, 4]]
        with pytest.raises(DataError, match="has no end.*TRAIN_STEPS.*take"):
            found.count()


def test_workers_keep_their_rows():
    rows = np.array([3, 0])
    assert labels(examples().batch(3), 4, 1, 3, rows) == [[7, 4], [-1, 8], [3, 0]]


def test_weights_are_the_users_and_zero_for_padding():
    data = tf.data.Dataset.from_tensor_slices((X[:3], Y[:3], np.float64([0.5, 2, 3])))
    (batch,) = stream(data).batches(5, 0).take(1)
    assert batch["weight"].dtype == tf.float32
    np.testing.assert_array_equal(batch["weight"], [0.5, 2, 3, 0, 0])
    np.testing.assert_array_equal(batch["image"], X[[0, 1, 2, 0, 1]])


def test_text_and_ragged_tensors_of_one_length_are_dense():
    ragged = tf.RaggedTensor.from_row_lengths([1, 2, 3, 4], [2, 2])
    ragged = tf.data.Dataset.from_tensor_slices({"token": ragged, "text": ["a\0", "b"]}).map(
        lambda one: {**one, "token": tf.ensure_shape(one["token"], [2])}
    )
    (batch,) = stream(ragged.ragged_batch(2)).batches(3, 0).take(1)
    np.testing.assert_array_equal(batch["token"], [[1, 2], [3, 4], [1, 2]])
    assert batch["text"].numpy().tolist() == [b"a\0", b"b", b"a\0"]


def test_windows_are_examples_if_the_user_says_so():
    windows = tf.data.Dataset.range(12).batch(3, drop_remainder=True).map(lambda w: {"x": w})
    assert stream(windows, batched=False).element_spec["x"].shape == [3]
    assert stream(windows).num_examples == 12
    for part in (lambda w: w[2], lambda w: w[1:]):
        split = tf.data.Dataset.range(12).batch(3, drop_remainder=True)
        split = split.map(lambda w, part=part: (w[:2], part(w)))
        assert stream(split).element_spec["image"].shape == [2]


def test_arrays_that_a_generator_fills_anew_are_copied():
    def filled():
        array = np.zeros(1)
        for label in Y:
            array[:] = label
            yield {"x": array, "label": label}

    (batch,) = stream(filled).batches(N, 0).take(1)
    np.testing.assert_array_equal(batch["x"][:, 0], Y)


def test_one_note_tells_of_data_that_differ_from_read_to_read(caplog):
    tf.random.set_seed(None)
    for data, differs in (
        (examples().shuffle(N), True),
        (lambda: examples().shuffle(N, seed=1), False),
        (examples().map(lambda x, y: (x + tf.random.normal([2]), y)), True),
    ):
        caplog.clear()
        assert stream(data).is_repeatable != differs
        assert [("differ" in one.message) for one in caplog.records] == [True] * differs


def test_skipping_is_told(caplog, capfd, monkeypatch):
    found = stream(examples().repeat())
    monkeypatch.setattr(sys.modules["ddl.data.stream"], "_SECONDS", 0.0)
    labels(found, 4, 1000, 1)
    assert "Skipping 4,000 examples of the tf.data.Dataset" in caplog.text.replace("The", "the")
    assert "Skipped 400 of 4000 examples of" in capfd.readouterr().err


def ragged():
    return (tf.range(n) for n in (2, 3))


WRONG = {
    "empty": (lambda: examples().take(0), "at least 1 example, got 0"),
    "nothing passes the filter": (lambda: examples().filter(lambda x, y: False), "got 0"),
    "an empty generator": (lambda: lambda: iter(()), "<lambda> must have at least 1 example"),
    "a number": (lambda: 3, "got int"),
    "a function of something else": (lambda: lambda split: examples(), "argument epoch"),
    "tokens of any length": (
        lambda: tf.data.Dataset.from_generator(ragged, output_signature=tf.TensorSpec([None])).map(
            lambda t: {"token": t}
        ),
        "may be a batch.*batched=True",
    ),
    "padded to the longest of a batch": (
        lambda: examples().map(lambda x, y: {"t": tf.range(y)}).padded_batch(3),
        "one static shape.*Pad all to one length, or pack",
    ),
    "lengths that vary": (
        lambda: lambda: ({"x": np.zeros(n)} for n in (2, 2, 3)),
        r"Element 2 of .*test_stream.py:\d+: <lambda> must be like the first.*\(3,\)",
    ),
    "a generator that fails": (
        lambda: lambda: ({"x": 1 // n} for n in (1, 0)),
        r"ZeroDivisionError.*test_stream.py:\d+\)",
    ),
    "a file that is missing": (
        lambda: tf.data.TextLineDataset("/no/file").map(lambda t: {"x": t}),
        "could not be read.*/no/file",
    ),
}


@pytest.mark.parametrize(("make", "told"), WRONG.values(), ids=WRONG)
def test_wrong_data_are_refused_at_the_start(make, told):
    with pytest.raises((DataError, ConfigError), match=told):
        stream(make())


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (lambda epoch: examples(N - 8 * epoch), "must have 11 examples in each pass, got 3"),
        (lambda epoch: examples(4 + epoch), "must have 4 examples in each pass, got 5"),
        (lambda epoch: iter(one_by_one()) if epoch == 0 else (), "at least 1 ex.* got 0"),
        (examples().batch(3).map(lambda x, y: (x[1:], y[1:])), "11 examples .* got 7"),
    ],
)
def test_another_length_than_announced_is_an_error(data, told):
    found = stream(data)
    with pytest.raises(tf.errors.InvalidArgumentError, match=told):
        labels(found, 4, 0, 9)


def test_an_epoch_of_other_features():
    found = stream(lambda epoch: examples() if epoch == 0 else examples().map(lambda x, y: (x, x)))
    with pytest.raises(tf.errors.OpError):
        labels(found, 4, 0, 9)
    assert "must return the features of epoch 0" in str(found.error)


def test_generators_outlive_what_made_them():
    """A pass is read long after the data set that the user's function returned is gone."""

    def made():
        return tf.data.Dataset.from_generator(
            one_by_one, output_signature=(tf.TensorSpec([2]), tf.TensorSpec([], tf.int64))
        ).repeat()

    batches = iter(stream(made).batches(4, 0))
    gc.collect()
    assert next(batches)["label"].numpy().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", ["data sets", "generators", "generators in data sets"])
def test_what_a_function_holds_is_freed_with_the_iterator(kind):
    """TensorFlow keeps functions of Python for good."""

    class Held:
        rows = X

    held = Held()
    spec = {"x": tf.TensorSpec([2])}
    functions = {
        "data sets": lambda: tf.data.Dataset.from_tensor_slices({"x": held.rows}),
        "generators": lambda: ({"x": row} for row in held.rows),
        "generators in data sets": lambda: tf.data.Dataset.from_generator(
            functions["generators"], output_signature=spec
        ),
    }
    pipeline = BatchPipeline(stream(functions[kind]), 4)
    iterator = pipeline.iterator(make_strategy("one_device", 1))
    for _ in range(7):
        next(iterator)
    held, found = None, weakref.ref(held)
    del pipeline, iterator
    functions.clear()
    gc.collect()
    assert found() is None
