"""Parts, folds and concatenations of data sets of each kind."""

import numpy as np
import pytest
import tensorflow as tf
from ddl.data.combining import Mixture, concatenation, k_fold, subset

import ddl.data
from ddl.data import ArraySource, RandomAccessSource, RecordSource
from ddl.errors import ConfigError, DataError
from tests.data.test_records import taken

N = 11


def arrays(first=0, count=N):
    return ArraySource(x=np.arange(first, first + count))


def looked_up(first=0, count=N):
    return RandomAccessSource(lambda indices: {"x": indices + first}, count)


def records(folder, first=0, count=N):
    file = str(folder / f"records-{first}")
    with tf.io.TFRecordWriter(file) as writer:
        for number in range(first, first + count):
            writer.write(str(number).encode())
    return RecordSource([file], lambda record, seed: {"x": tf.strings.to_number(record, tf.int64)})


@pytest.fixture(params=["arrays", "looked_up", "records"])
def make(request, tmp_path):
    if request.param == "records":
        return lambda *args: records(tmp_path, *args)
    return {"arrays": arrays, "looked_up": looked_up}[request.param]


def values(source, shuffle=False, **where):
    steps = source.steps_per_epoch(4)
    return [
        x
        for batch in taken(source, steps, shuffle=shuffle, **where)
        for x, w in zip(batch["x"], batch["weight"], strict=True)
        if w
    ]


def test_the_first_examples(make):
    source = subset(make(), first=5)
    assert len(source) == 5
    assert values(source) == [0, 1, 2, 3, 4]
    assert sorted(values(source, shuffle=True)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("text", [True, False])
def test_listed_examples(make, tmp_path, text):
    file = tmp_path / ("rows.txt" if text else "rows.npy")
    file.write_text("7\n0\n3\n") if text else np.save(file, [7, 0, 3])
    assert values(subset(make(), index_file=str(file))) == [7, 0, 3]


def test_folds_share_out_the_examples(make):
    source = make()
    held_out = [values(k_fold(source, folds=3, fold=f, part="held_out", seed=1)) for f in range(3)]
    assert sorted(np.concatenate(held_out)) == list(range(N))
    assert {len(part) for part in held_out} == {3, 4}
    train = values(k_fold(source, folds=3, fold=1, part="train", seed=1))
    assert sorted(train + held_out[1]) == list(range(N))
    assert held_out[0] != values(k_fold(source, folds=3, fold=0, part="held_out", seed=2))


def test_one_after_the_other(make):
    source = concatenation([make(), make(20, 3), make(30, 1)])
    assert values(source) == [*range(N), 20, 21, 22, 30]
    assert sorted(values(source, shuffle=True)) == [*range(N), 20, 21, 22, 30]
    assert values(source, shuffle=True) != sorted(values(source, shuffle=True))


def test_arrays_stay_arrays():
    """So that they can lie on the devices."""
    both = concatenation([arrays(), arrays(20)])
    assert isinstance(both, ArraySource)
    assert isinstance(subset(both, first=3), ArraySource)
    assert isinstance(k_fold(both, folds=2, fold=0, part="train"), ArraySource)


def test_kinds_can_be_concatenated(tmp_path):
    source = concatenation([arrays(), looked_up(20, 2), records(tmp_path, 30, 2)])
    assert values(source) == [*range(N), 20, 21, 30, 31]


@pytest.mark.parametrize("form", [lambda: {"x": np.arange(5)}, arrays])
def test_whatever_is_converted_into_a_source_can_be_combined(form):
    assert values(subset(form(), first=2)) == [0, 1]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: subset(arrays()), ConfigError, "either first, a number of examples, or"),
        (lambda: subset(arrays(), first=12), DataError, "from 1 to 11, the number of examples"),
        (lambda: subset(arrays(), index_file="absent"), DataError, "'absent' could not be read"),
        (lambda: k_fold(arrays(), folds=1, fold=0, part="train"), ConfigError, "at least 2"),
        (lambda: k_fold(arrays(), folds=2, fold=2, part="train"), ConfigError, "fold = 2"),
        (lambda: k_fold(arrays(), folds=2, fold=0, part="test"), ConfigError, "'held_out', got"),
        (lambda: k_fold(arrays(), folds=12, fold=0, part="train"), DataError, "at most 11"),
        (lambda: concatenation([]), DataError, "at least one data set, got an empty list. Pass"),
        (lambda: concatenation("ab"), DataError, "takes a list of data sets, got str"),
        (
            lambda: concatenation([arrays(), ArraySource(x=np.zeros(3))]),
            DataError,
            r"0 has x: int64 \(\); number 1 has x: float64 \(\)",
        ),
        (
            lambda: subset(tf.data.Dataset.range(4).map(lambda x: {"x": x}), first=2),
            DataError,
            "found by their numbers, got StreamSource",
        ),
        (lambda: Mixture([arrays()], [0.5]), ConfigError, "add up to 1"),
        (lambda: Mixture([arrays()] * 2, [1.5, -0.5]), ConfigError, "positive numbers"),
        (lambda: Mixture([arrays()] * 2, [1.0]), ConfigError, "there are 2 sources"),
        (lambda: Mixture([arrays()] * 2, [1 - 1e-7, 1e-7]), ConfigError, "at least 1/10,000"),
        (lambda: Mixture([arrays()], [1.0], num_examples=0), ConfigError, "num_examples must be"),
        (
            lambda: Mixture([arrays()], [1.0], later_shares={0: [1.0]}),
            ConfigError,
            "from 1 on",
        ),
        (lambda: Mixture([], []), DataError, "at least one data set"),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "at least one integer"),
        ("1\n11\n", "numbers from 0 to 10, since the data have 11 examples, got 11"),
        ("-1\n", "got -1"),
        ("1\n2\n1\n", "each example once, got 1 2 times"),
        ("a\n", "could not be read"),
        ("0.5\n", "could not be read"),
        ("1 2\n3 4\n", "in one column"),
    ],
)
@pytest.mark.filterwarnings("ignore:loadtxt")
def test_bad_index_files(tmp_path, text, message):
    (tmp_path / "rows").write_text(text)
    with pytest.raises(DataError, match=message):
        subset(arrays(), index_file=tmp_path / "rows")


# ------------------------------------------------------------ mixtures


def mixed(make, **arguments):
    return Mixture([make(), make(100, 3)], [0.7, 0.3], **arguments)


def rows_of(source, batches, first=0, **where):
    return np.array([batch["x"] for batch in taken(source, batches, first=first, **where)])


def test_the_shares_hold():
    source = Mixture([arrays(0, 6_000), arrays(10_000, 2_000)], [0.7, 0.3], num_examples=10_000)
    found = rows_of(source, 20, batch=500) >= 10_000
    assert found.sum() == 3_000
    in_a_batch = found.sum(axis=1)
    assert 100 < in_a_batch.min() < in_a_batch.max() < 200


def test_each_source_is_read_in_epochs_of_its_own(make):
    found = rows_of(mixed(make), 30).ravel()
    own = found[found < 100]
    epochs = own[: len(own) // N * N].reshape(-1, N)
    assert all(sorted(epoch) == list(range(N)) for epoch in epochs)
    assert epochs[0].tolist() != epochs[1].tolist()


def test_any_batch_is_a_function_of_its_number_and_the_seed(make):
    source = mixed(make, later_shares={3: (0.2, 0.8)})
    straight = rows_of(source, 8)
    np.testing.assert_array_equal(rows_of(source, 3, first=5), straight[5:])
    np.testing.assert_array_equal(rows_of(source, 8, rows=np.array([3, 1])), straight[:, [3, 1]])
    assert not np.array_equal(rows_of(source, 8, seed=1), straight)


def test_later_shares():
    source = mixed(arrays, later_shares={10: (0.1, 0.9)}, num_examples=1_000)
    numbers = rows_of(source, 40, batch=50)
    found = numbers >= 100
    assert 0.2 < found[:10].mean() < 0.4
    assert 0.85 < found[10:].mean() < 0.95
    own = numbers[found]  # its epochs go on where the shares change
    epochs = own[: len(own) // 3 * 3].reshape(-1, 3)
    assert (np.sort(epochs) == [100, 101, 102]).all()


def test_every_example_that_is_read_counts():
    """Also in the last batch of an epoch, which has more examples than `num_examples` leaves."""
    source = mixed(arrays, num_examples=6)
    assert all(batch["weight"].tolist() == [1] * 4 for batch in taken(source, 4))


def test_an_example_has_another_seed_in_each_pass(tmp_path):
    rare = records(tmp_path, 0, 3)
    rare = RecordSource([str(tmp_path / "records-0")], lambda record, seed: {"x": seed})
    seeds = rows_of(Mixture([rare], [1.0], num_examples=300), 10).reshape(-1, 2)
    assert len(np.unique(seeds, axis=0)) == len(seeds) == 40


def test_a_damaged_example_is_found_whatever_the_length_of_an_epoch(tmp_path):
    source = records(tmp_path)
    assert Mixture([source], [1.0], num_examples=2 * N).damaged() is None
    file = tmp_path / "records-0"
    content = bytearray(file.read_bytes())
    content[-6] ^= 1  # data of the last record
    file.write_bytes(content)
    assert "records-0" in Mixture([source], [1.0], num_examples=2).damaged()


def test_public_names():
    assert ddl.data.subset is subset
