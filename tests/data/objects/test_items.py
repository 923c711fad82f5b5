import numpy as np
import pytest

from ddl.data import from_items
from ddl.data.checks import data_errors
from ddl.errors import ConfigError, DataError
from tests.data.test_records import taken

COUNT = 11


class Items:
    """As a map-style data set of PyTorch."""

    def __init__(self, change=lambda number: number):
        self.change = change

    def __len__(self):
        return COUNT

    def __getitem__(self, number):
        if not 0 <= number < COUNT:
            raise IndexError(number)
        return np.full([2], self.change(number), np.float32), number


class InBatches(Items):
    def __init__(self):
        super().__init__()
        self.asked = []

    def __getitems__(self, numbers):
        self.asked.append(numbers)
        return [self[number] for number in numbers]


def test_each_example_once_an_epoch_and_any_batch_is_found():
    source = from_items(Items())
    assert len(source) == COUNT
    epoch = taken(source, 3)
    found = [x for b in epoch for x, w in zip(b["label"], b["weight"], strict=True) if w]
    assert sorted(found) == list(range(COUNT))
    assert found != sorted(found)
    rows = np.array([3, 1])
    for whole, part in zip(epoch[1:], taken(source, 2, first=1, rows=rows), strict=True):
        np.testing.assert_array_equal(part["image"], whole["image"][rows])


def test_rows_of_a_batch_are_asked_for_at_once():
    items = InBatches()
    source = from_items(items)
    items.asked.clear()
    taken(source, 1, shuffle=False)
    assert [0, 1, 2, 3] in items.asked


def test_items_are_decoded():
    source = from_items([b"1 2", b"3 4"], lambda item: {"x": np.array(item.split(), np.int64)})
    (batch,) = taken(source, 1, batch=2, shuffle=False)
    assert batch["x"].tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "list of from_items must have at least one item, got 0. Correct"),
        (iter([1]), "got list_iterator without __len__. .*use ddl.data.endless"),
        ([3], "item 0 must be a dict of features"),
        (
            Items(lambda number: np.random.default_rng().random()),
            "Two reads of item 0 of the Items",
        ),
    ],
)
def test_what_is_found_at_the_start(data, message):
    with pytest.raises(DataError, match=message):
        from_items(data)


def test_refuses_a_decode_of_other_arguments():
    with pytest.raises(ConfigError, match=r"decode must be a function of \(item\)"):
        from_items([1], lambda: {})


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (
            [{"x": np.zeros(2)}, {"x": np.zeros(3)}],
            r"'x' of item 1 must be float64 of shape \(2,\)",
        ),
        ([{"x": 1}, {"x": None}], "'x' of item 1 must be numbers or text"),
        ([{"x": 1}, {"y": 1}], "item 1 must have the features of the first example, x, got y"),
    ],
)
def test_an_item_of_another_form_is_named(items, message):
    with pytest.raises(DataError, match=message), data_errors():
        taken(from_items(items), 1, batch=2, shuffle=False)


def test_items_may_fill_one_array():
    class Refilling(Items):
        array = np.zeros(2, np.float32)

        def __getitem__(self, number):
            super().__getitem__(number)  # raises beyond the end
            self.array[:] = number
            return self.array, number

    (batch,) = taken(from_items(Refilling()), 1, batch=6)
    assert batch["image"][:, 0].tolist() == batch["label"].tolist()
