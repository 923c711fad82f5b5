"""Masking of tokens against a reference in numpy, given the draws."""

import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.errors import ConfigError
from tests.conftest import microbatch
from tests.layers.given_draws import GivenDraws

TOKENS = np.random.default_rng(0).integers(0, 50, (16, 30))
MASK = 50


@pytest.mark.parametrize("dtype", ["int64", "int32"])
def test_against_a_reference(monkeypatch, dtype):
    draws = GivenDraws(monkeypatch)
    layer = ddl.layers.TokenMasking(MASK, 50, rate=0.4, kept_tokens=(0, 7))
    can_mask = np.arange(30) < 25
    found = layer(tf.constant(TOKENS, dtype), tf.constant(np.tile(can_mask, (16, 1))))
    (drawn,) = draws.drawn
    expected, weight = TOKENS.copy(), np.zeros(TOKENS.shape)
    for place in np.ndindex(TOKENS.shape):
        kind, which = drawn[place].astype(float)
        if kind >= 0.4 or TOKENS[place] in (0, 7) or not can_mask[place[1]]:
            continue
        weight[place] = 1
        if kind < 0.4 * 0.8:
            expected[place] = MASK
        elif kind < 0.4 * 0.9:
            expected[place] = int(which * 50)
    assert found.token.dtype == dtype
    np.testing.assert_array_equal(found.token, expected)
    np.testing.assert_array_equal(found.weight, weight)


def masked(first_row=0, rows=16, training=True):
    layer = ddl.layers.TokenMasking(MASK, 50)
    with microbatch(first_row, rows, training=training).forward():
        return layer(tf.constant(TOKENS[first_row : first_row + rows]))


def test_replicas_mask_as_one_device_does():
    whole, part = masked(), masked(4, 8)
    np.testing.assert_array_equal(part.token, whole.token[4:12])
    np.testing.assert_array_equal(part.weight, whole.weight[4:12])
    assert (masked(training=False).token.numpy() != whole.token.numpy()).any()


def test_shares():
    token = tf.zeros([200, 500], tf.int64)
    with microbatch(rows=200).forward():
        found, weight = ddl.layers.TokenMasking(MASK, 2**20)(token)
    weight, found = weight.numpy(), found.numpy()
    assert weight.mean() == pytest.approx(0.15, abs=0.005)
    assert (found == MASK).sum() / weight.sum() == pytest.approx(0.8, abs=0.02)
    random = found[(found > 0) & (found != MASK)]
    assert len(random) / weight.sum() == pytest.approx(0.1, abs=0.02)
    assert random.mean() == pytest.approx(2**19, rel=0.05)
    assert random.max() < 2**20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"vocabulary_size": 2**24}, "vocabulary_size must be from 1 to 2"),
        ({"mask_token": -1}, "mask_token at least 0"),
        ({"rate": 0.0}, "rate must be above 0"),
        ({"masked": 0.9, "randomized": 0.2}, "at most 1 in sum"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ConfigError, match=message):
        ddl.layers.TokenMasking(**{"mask_token": MASK, "vocabulary_size": 50, **arguments})


def test_floats_are_refused():
    with pytest.raises(ConfigError, match="integer tokens, got float32"):
        ddl.layers.TokenMasking(MASK, 50)(tf.zeros([2, 3]))
