"""Accuracies of labels of every integer dtype."""

import numpy as np
import pytest
import tensorflow as tf

from ddl.tasks.accuracy import accuracy, top_k_accuracy
from ddl.tasks.cross_entropy import cross_entropy

LOGITS = tf.constant([[0.0, 2.0, 1.0], [3.0, 2.0, 1.0], [0.0, 1.0, 2.0]])


@pytest.mark.parametrize("kind", ["uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64"])
def test_labels_of_any_integer_dtype(kind):
    labels = tf.constant(np.array([1, 1, 0], kind))
    assert accuracy(labels, LOGITS).numpy().tolist() == [1, 0, 0]
    assert top_k_accuracy(labels, LOGITS, 2).numpy().tolist() == [1, 1, 0]


@pytest.mark.parametrize("place", [0, 1, None])
def test_a_row_with_a_nan_is_wrong(place):
    """Also where the NaN is the label's logit, another one, or the whole row."""
    row = np.array([1.0, 2.0, 0.0], np.float32)
    row[slice(None) if place is None else place] = np.nan
    labels, logits = tf.constant([0, 1, 1]), tf.constant(np.stack([row, row, [0.0, 1.0, 0.0]]))
    assert accuracy(labels, logits).numpy().tolist() == [0, 0, 1]
    loss = cross_entropy(tf.constant([0, 1, 1], tf.int64), logits)
    assert accuracy(labels, logits, loss).numpy().tolist() == [0, 0, 1]
    for k in (1, 2, 3):
        assert top_k_accuracy(labels, logits, k).numpy().tolist() == [0, 0, 1]


def test_masked_classes_are_no_nan():
    logits = tf.constant([[0.0, -np.inf, 1.0], [-np.inf, 0.0, 1.0]])
    labels = tf.constant([2, 0], tf.int64)
    assert accuracy(labels, logits, cross_entropy(labels, logits)).numpy().tolist() == [1, 0]
