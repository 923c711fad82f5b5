import numpy as np
import pytest
import tensorflow as tf

import ddl
from tests.conftest import microbatch

TOKENS = np.random.default_rng(0).integers(1, 50, (200, 400))


def test_logits_share_the_table_and_its_gradient():
    layer = ddl.layers.TiedEmbedding(5, 3)
    tokens = tf.constant([[0, 4], [2, 2]])
    vectors = layer(tokens)
    with tf.GradientTape() as tape:
        logits = layer(layer(tokens), as_logits=True)
        loss = tf.reduce_sum(logits**2)
    table = layer.embeddings.numpy()
    np.testing.assert_allclose(logits, vectors.numpy() @ table.T, rtol=1e-6)
    (gradient,) = tape.gradient(loss, layer.trainable_variables)
    rows = np.eye(5)[tokens.numpy().reshape(-1)]
    inner = 2 * logits.numpy().reshape(-1, 5)
    expected = inner.T @ (rows @ table) + rows.T @ (inner @ table)
    np.testing.assert_allclose(tf.convert_to_tensor(gradient), expected, rtol=1e-5)


def masked(first_row=0, rows=200, training=True, **arguments):
    layer = ddl.layers.TokenMasking(50, 2**20, kept_tokens=(7,))
    with microbatch(first_row, rows, training=training).forward():
        return layer(tf.constant(TOKENS[first_row : first_row + rows]), **arguments)


def test_masking_takes_its_shares_and_keeps_tokens():
    can_mask = np.tile(np.arange(400) < 300, (200, 1))
    found, weight = (each.numpy() for each in masked(can_mask=can_mask))
    assert not weight[(TOKENS == 7) | ~can_mask].any()
    assert weight[(TOKENS != 7) & can_mask].mean() == pytest.approx(0.15, abs=0.005)
    np.testing.assert_array_equal(found[weight == 0], TOKENS[weight == 0])
    assert (found == 50).sum() / weight.sum() == pytest.approx(0.8, abs=0.02)
    random = found[found > 50]
    assert len(random) / weight.sum() == pytest.approx(0.1, abs=0.02)
    assert random.mean() == pytest.approx(2**19, rel=0.05)


def test_replicas_mask_as_one_device_does():
    whole, part = masked(), masked(4, 8)
    np.testing.assert_array_equal(part.token, whole.token[4:12])
    assert (masked(training=False).token.numpy() != whole.token.numpy()).any()
