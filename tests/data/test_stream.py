"""A user's pipeline as it is: every form gives the batches of the same examples."""

import re
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

from ddl.data import stream, subset
from ddl.errors import ConfigError, DataError

N = 11
X = np.arange(2 * N, dtype=np.float32).reshape(N, 2)
Y = np.arange(N)


def examples(count=N):
    return tf.data.Dataset.from_tensor_slices((X[:count], Y[:count]))


def one_by_one():
    yield from zip(X, Y, strict=True)


class Batches(keras.utils.PyDataset):
    """Batches of 3, which the end of an epoch shifts by 100."""

    shift = 0

    def __len__(self):
        return 4

    def __getitem__(self, number):
        return X[3 * number :][:3] + self.shift, Y[3 * number :][:3] + self.shift

    def on_epoch_end(self):
        self.shift += 100


def labels(data, size, first=0, count=6):
    """Returns the labels of batches, with -1 for padding."""
    found = stream(data) if not hasattr(data, "batches") else data
    batches = found.batches(size, first)
    assert batches.cardinality() == tf.data.INFINITE_CARDINALITY
    assert all(spec.shape.is_fully_defined() for spec in batches.element_spec.values())
    read = list(batches.take(count).as_numpy_iterator())
    return [np.where(one["weight"] > 0, one["label"], -1).tolist() for one in read]


PASS = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, -1]]
KNOWN = {
    "examples": examples,
    "batches": lambda: examples().batch(3),
    "padded batches": lambda: examples().padded_batch(5).map(lambda x, y: (x, y)).prefetch(2),
    "a function": lambda: lambda: examples().batch(2),
}
UNKNOWN = {
    "filtered batches": lambda: examples().batch(3).filter(lambda x, y: True),
    "batches that a map made": lambda: tf.data.Dataset.range(0, N, 4).map(
        lambda n: (tf.constant(X)[n : n + 4], tf.constant(Y)[n : n + 4])
    ),
    "a PyDataset": lambda: type("Still", (Batches,), {"on_epoch_end": lambda self: None})(),
    "a generator": lambda: one_by_one,
}


@pytest.mark.parametrize("make", [*KNOWN.values(), *UNKNOWN.values()], ids=[*KNOWN, *UNKNOWN])
def test_each_pass_holds_each_example_once_in_order(make):
    found = stream(make())
    assert {name: (spec.shape, spec.dtype) for name, spec in found.element_spec.items()} == {
        "input": ([2], tf.float32),
        "label": ([], tf.int64),
    }
    assert labels(found, 4) == PASS + PASS
    assert found.num_examples == (N if make in KNOWN.values() else None)


def epochs(epoch):
    return examples().map(lambda x, y: (x, y + 100 * epoch))


def generated(epoch):
    assert isinstance(epoch, int)
    return ({"label": y + 100 * epoch} for y in Y)


@pytest.mark.parametrize(
    "make", [lambda: epochs, lambda: generated, Batches, lambda: examples().repeat(3)]
)
def test_a_run_resumes_at_any_batch(make, caplog, capfd, monkeypatch):
    monkeypatch.setitem(stream.__globals__, "_SECONDS", -1.0)  # between two lines of progress
    whole = labels(make(), 4, 0, 10)
    assert labels(make(), 4, 7, 3) == whole[7:]
    (skipped,) = re.findall(r"Skipping (\d+) examples of", caplog.text)
    assert f"Skipped {int(skipped) - 4} of {skipped} examples of" in capfd.readouterr().err


def test_a_function_of_the_epoch_makes_each_pass():
    for make in (epochs, generated, Batches()):
        second = [[100, 101, 102, 103], [104, 105, 106, 107], [108, 109, 110, -1]]
        assert labels(make, 4) == PASS + second


def test_endless_data_are_never_padded():
    for data in (examples().repeat(), examples().batch(3).repeat()):
        found = stream(data)
        assert found.is_endless
        assert labels(found, 4, 2, 2) == [[8, 9, 10, 0], [1, 2, 3, 4]]
        with pytest.raises(DataError, match="has no end.*TRAIN_STEPS.*take"):
            found.count()


def test_an_error_tells_how_a_map_may_change_the_rows_of_batches():
    halved = examples().batch(4).map(lambda x, y: (x[::2], y[::2]))
    with pytest.raises(tf.errors.InvalidArgumentError, match="11 examples .* got 6.*unbatch"):
        labels(halved, 4)
    assert labels(halved.unbatch(), 4, count=2) == [[0, 2, 4, 6], [8, 10, -1, -1]]


def test_streams_have_no_subsets():
    for data in (examples(), Batches(), stream(examples())):
        with pytest.raises(DataError, match="got a stream"):
            subset(data, 2)


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


def test_a_generator_that_may_yield_batches_is_told_of(caplog):
    def batches():
        yield np.zeros([5, 2], "f4"), np.zeros(5, "f4")

    for batched, shape in ((None, [5, 2]), (True, [2])):
        assert stream(batches, batched=batched).element_spec["input"].shape == shape
    assert caplog.text.count("batched=True") == 1


def test_ragged_features_become_dense_and_none_is_cut():
    def of_length(size):
        batch = {"label": tf.RaggedTensor.from_row_lengths(range(6), [1, 3, 2])}
        spec = {"label": tf.RaggedTensorSpec([None, size], tf.int32)}
        return stream(tf.data.Dataset.from_generator(lambda: [batch], output_signature=spec))

    (batch,) = of_length(4).batches(3, 0).take(1).as_numpy_iterator()
    assert batch["label"].tolist() == [[0, 0, 0, 0], [1, 2, 3, 0], [4, 5, 0, 0]]
    with pytest.raises(DataError, match=r"\[3,3\] is not compatible with .*2\]"):
        of_length(2)


def ragged():
    return (tf.range(n) for n in (2, 3))


WRONG = {
    "tokens of any length": (
        lambda: tf.data.Dataset.from_generator(ragged, output_signature=tf.TensorSpec([None])).map(
            lambda t: {"token": t}
        ),
        "may be a batch.*batched=True",
    ),
    "padded to the longest of a batch": (
        lambda: examples().map(lambda x, y: {"t": tf.range(y)}).padded_batch(3),
        "one static shape.*pad texts to one length, or pack",
    ),
    "lengths that vary": (
        lambda: lambda: ({"x": np.zeros(n)} for n in (2, 2, 3)),
        r"Element 2 of .*test_stream.py:\d+: <lambda> must be like the first.*\(3,\)",
    ),
    "sparse": (
        lambda: examples().map(lambda x, y: {"x": tf.sparse.from_dense(x)}).batch(3),
        "'x' of .* is a SparseTensorSpec. Make it dense",
    ),
    "a disk": (lambda: lambda: (n for n in ()).throw(OSError("broken")), "^broken$"),
    "a file that is missing": (
        lambda: tf.data.TextLineDataset("/no/file").map(lambda t: {"x": t}),
        "could not be read.*/no/file",
    ),
}


@pytest.mark.parametrize(("make", "told"), WRONG.values(), ids=WRONG)
def test_wrong_data_are_refused_at_the_start(make, told):
    with pytest.raises((DataError, ConfigError, OSError), match=told):
        stream(make())


def test_a_py_dataset_may_refill_its_arrays():
    memory = np.zeros(24, np.int64)  # TensorFlow takes an array at a multiple of 64 bytes as it is
    label = memory[-memory.ctypes.data % 64 // 8 :][:3]

    class Refilling(keras.utils.PyDataset):
        def __len__(self):
            return 50

        def __getitem__(self, number):
            label[:] = range(3 * number, 3 * number + 3)
            return {"label": label}

    assert np.ravel(labels(Refilling(), 3, count=50)).tolist() == list(range(150))


def test_the_workers_of_a_py_dataset_read_at_once():
    both = threading.Barrier(2)

    class Meeting(Batches):
        def __getitem__(self, number):
            if hasattr(self, "meets"):
                both.wait(60)
            return super().__getitem__(number)

    found = stream(data := Meeting(workers=2))
    data.meets = True
    assert labels(found, 4, count=3) == PASS
