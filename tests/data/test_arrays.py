import numpy as np
import pytest
import tensorflow as tf
from ddl.data.pipeline.first_examples import first_examples

from ddl.data import ArraySource, BatchPipeline, concatenation, subset
from ddl.errors import DataError


def test_arrays_keep_their_dtypes_and_are_gathered_by_row():
    source = ArraySource({"x": np.arange(12.0).reshape(6, 2)}, label=[5, 4, 3, 2, 1, 0])
    assert len(source) == 6
    assert source.element_spec["x"] == tf.TensorSpec([2], tf.float64, "x")
    assert source.element_spec["label"].dtype == tf.int64
    rows = tf.function(source.gather)(tf.constant([4, 0], tf.int64))
    assert rows["x"].numpy().tolist() == [[8, 9], [0, 1]]
    assert rows["label"].numpy().tolist() == [1, 5]


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ({}, "at least one feature"),
        ({"x": []}, r"'x' must have at least one example, got shape \(0,\). Pass data"),
        ({"x": 3.0}, "'x' must .* got a single value, 3.0. Repeat it"),
        ({"x": [1, 2], "y": [1]}, "'x' has 2 and 'y' has 1. Pass arrays"),
        ({"x": np.array(["a", "b"], object)}, r"got text as Python objects.* np.asarray\(…, str\)"),
        ({"x": np.array([b"a\0"], object)}, r"text as Python objects.* as a list, \.tolist\(\)"),
        ({"x": np.array([{}, 2], object)}, "'x' must have a numeric dtype, got Python objects"),
        ({"x": [[1, 2], [3]]}, "'x' must be an array .* could not convert it: .*[^.]. Pad rows"),
        ({"x": np.array(["2020-01-01"], "datetime64[D]")}, "'x' has dtype datetime64"),
        (
            {"x": [0.0, np.nan, np.inf]},
            "'x' contains 2 NaN or infinite values, the first in example 1",
        ),
        (
            {"x": np.array([0, np.inf], np.float16)},
            "'x' contains 1 NaN or infinite values, the first in example 1",
        ),
        ({"x": [1, 2], "weight": [1, 2]}, r"float per example, got int64 .*\. Pass an array \["),
        (
            {"x": [1, 2], "weight": [[1.0], [2.0]]},
            r"'weight' must be one float per example, got float64 of shape \(2, 1\)",
        ),
        (
            {"x": [1, 2], "weight": [1.0, -2.0]},
            "'weight' must be at least 0, got -2.0 in example 1. Correct it",
        ),
        ({"x": [1, 2], "weight": [1.0, np.nan]}, "'weight' contains 1 NaN or infinite values"),
    ],
)
def test_unfit_arrays_are_refused(features, message):
    with pytest.raises(DataError, match=message):
        ArraySource(features)


@pytest.mark.parametrize("data", [[b"a\0", b"b"], ["a\0", "b"], [["a\0"], ["b"]]])
def test_text_keeps_zero_bytes_at_its_end(data):
    """Arrays of fixed-length text lose them."""
    first = subset(concatenation([ArraySource(x=data), ArraySource(x=data)]), first=3)
    (batch,) = first.batches(3, 0, seed=0, shuffle=False).take(1)
    assert batch["x"].numpy().ravel().tolist() == [b"a\0", b"b", b"a\0"]
    assert ArraySource(x=["a", "b"]).features["x"].dtype == "U1"


def test_values_that_are_not_finite_are_counted_across_chunks(monkeypatch):
    monkeypatch.setattr("ddl.data.arrays._CHUNK_BYTES", 32)
    array = np.zeros([50, 2])
    array[[17, 33, 49], 1] = np.nan
    with pytest.raises(
        DataError, match="contains 3 NaN or infinite values, the first in example 17"
    ):
        ArraySource(x=array)


class _Negated(ArraySource):
    def gather(self, indices):
        return {name: -rows for name, rows in super().gather(indices).items()}


def test_a_subclass_may_change_the_rows():
    """Where arrays would be read directly otherwise."""
    source, plain = _Negated(x=np.arange(6)), ArraySource(x=np.arange(6))
    pipeline = BatchPipeline(source, 2)
    assert not pipeline.resident
    assert BatchPipeline(plain, 2).resident
    assert first_examples(pipeline, 3, tf.distribute.get_strategy())["x"].numpy().max() <= 0
    for changed in (subset(source, first=3), concatenation([source, plain])):
        (batch,) = changed.batches(3, 0, seed=0, shuffle=False).take(1)
        assert batch["x"].numpy().tolist() == [0, -1, -2]


def test_a_subclass_must_not_change_single_examples_alone():
    with pytest.raises(DataError, match="Own overrides example, but batches .* Override gather"):

        class Own(ArraySource):
            def example(self, index, seed):
                return {"x": index}
