"""Digests are those of the values."""

import tensorflow as tf

from ddl.checkpoints.snapshot import digest_of


def of(*texts):
    return digest_of({"model/table": tf.constant(texts), "model/w": tf.constant([1.0])})


def test_texts_count_by_their_bytes():
    """An array of texts holds addresses, which are others each time."""
    kept = [of("alpha", "beta")]
    kept += [of("alpha", "beta") for _ in range(3)]
    assert len(set(kept)) == 1
    assert of("alpha", "gamma") != kept[0]


def test_where_a_run_stands_does_not_count():
    assert digest_of({"state/step": tf.constant(1)}) == digest_of({})
