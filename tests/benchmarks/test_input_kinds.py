import numpy as np
import pytest
import tensorflow as tf

from benchmarks import input_data
from benchmarks.input_data import BATCH
from benchmarks.input_kinds import ARRAY_RECORDS, KINDS
from ddl import data, distribution


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    images = np.random.default_rng(0).integers(0, 256, (4 * BATCH, 28, 28, 1), "u1")
    folder = tmp_path_factory.mktemp("kinds")
    return input_data.write(images, folder, array_records=input_data.has_grain())


def totals(batches):
    """Returns the sum of each feature over the rows that count; of texts, that of the lengths."""
    found = {}
    for batch in batches:
        values = {name: np.asarray(each) for name, each in batch.items()}
        counts = values.pop("weight", None)
        for name, each in values.items():
            numbers = np.vectorize(len)(each) if each.dtype == object else each.astype(float)
            rows = numbers.reshape(len(numbers), -1).sum(axis=1)
            found[name] = found.get(name, 0) + (rows if counts is None else rows * counts).sum()
    return found


@pytest.fixture(autouse=True)
def no_seed_of_tensorflow():
    """With one, TensorFlow cannot shuffle by a seed that is computed in a graph."""
    tf.random.set_seed(None)


@pytest.mark.parametrize("name", KINDS)
def test_all_read_the_same_rows(name, given):
    kind = KINDS[name]
    if name == ARRAY_RECORDS and not input_data.has_grain():
        pytest.skip("needs benchmarks/peers")
    source = kind.source(given)
    iterator = data.BatchPipeline(source, BATCH, resident=False).iterator(
        distribution.build_strategy("one_device")
    )
    steps = source.steps_per_epoch(BATCH)
    ours = totals(next(iterator) for _ in range(steps))
    theirs = totals(kind.dataset(given))
    # Without the labels of folders, and what a packed row has beside its tokens.
    ours = {feature: ours[feature] for feature in theirs}
    exactness = 0.05 if name == "mixture" else 1e-9  # draws rows again
    assert ours == {name: pytest.approx(each, rel=exactness) for name, each in theirs.items()}
    if kind.grain is not None and input_data.has_grain():
        iterator = iter(kind.grain(given))
        assert totals(next(iterator) for _ in range(steps)) == pytest.approx(ours, rel=1e-9)
