import keras
import numpy as np
import pytest

from ddl.errors import ConfigError, DataError
from ddl.models import bert, generate


def counting(positions=4, vocabulary=10):
    """A model that expects each token to be the one before it plus one."""
    tokens = keras.Input((positions,), dtype="int64")
    ahead = keras.layers.Embedding(vocabulary, vocabulary)
    model = keras.Model(tokens, ahead(tokens))
    ahead.set_weights([9 * np.roll(np.eye(vocabulary), 1, axis=1)])
    return model


def test_the_likeliest_tokens_beyond_the_positions():
    found = generate(counting(), np.array([[3, 4], [7, 8]]), 6, temperature=0)
    np.testing.assert_array_equal(found, [[5, 6, 7, 8, 9, 0], [9, 0, 1, 2, 3, 4]])
    np.testing.assert_array_equal(generate(counting(), [2], 3, temperature=0), [3, 4, 5])


def test_draws_follow_the_logits_and_the_seed():
    model = counting(1, 3)
    prompt = np.zeros((4000, 1), np.int64)
    found = generate(model, prompt, 1, temperature=9.0)[:, 0]
    shares = np.bincount(found, minlength=3) / len(found)
    expected = np.exp([0, 1, 0]) / np.exp([0, 1, 0]).sum()
    np.testing.assert_allclose(shares, expected, atol=0.03)
    np.testing.assert_array_equal(generate(model, prompt, 1, temperature=9.0)[:, 0], found)
    assert (generate(model, prompt, 1, temperature=9.0, seed=1)[:, 0] != found).any()
    assert {*generate(model, prompt, 1, temperature=9.0, top_k=1)[:, 0]} == {1}


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (
            ConfigError,
            "causal model, .* but those of 'bert' change with the tokens after it",
            {"model": bert(10, 4, width=8, heads=2, blocks=1), "prompt": [1, 2, 3, 4, 5]},
        ),
        (ConfigError, "top_p must be above 0 and at most 1, got 1.5", {"top_p": 1.5}),
        (DataError, r"from 0 to 9, .* got 3 to 10", {"prompt": [3, 10]}),
    ],
)
def test_what_is_refused(error, message, arguments):
    arguments = {"model": counting(), "prompt": [1], "length": 1} | arguments
    with pytest.raises(error, match=message):
        generate(**arguments)
