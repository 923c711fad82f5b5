import keras
import numpy as np
import pytest

from ddl.errors import ConfigError, DataError
from ddl.models import bert, generate, gpt, mlp


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


def test_the_nucleus():
    """The fewest tokens that have a probability together, after the temperature."""
    model = counting(1, 4)
    prompt = np.zeros((300, 1), np.int64)
    for logits in ([0.5, 0.3, 0.15, 0.05], [0.05, 0.15, 0.3, 0.5]):
        model.set_weights([np.log([logits] * 4)])
        order = np.argsort(logits)[::-1]
        for top_p, kept in [(0.4, 1), (0.79, 2), (0.81, 3), (0.96, 4)]:
            found = generate(model, prompt, 1, top_p=top_p)[:, 0]
            assert {*found.tolist()} == {*order[:kept].tolist()}
    assert {*generate(counting(1, 3), prompt, 1, temperature=2.0, top_p=0.9)[:, 0]} == {1}
    assert len({*generate(counting(1, 3), prompt, 1, temperature=9.0, top_p=0.9)[:, 0]}) > 1


def test_of_equal_logits_exactly_as_many_tokens_as_allowed_are_drawn():
    flat = counting(1, 8)
    flat.set_weights([np.zeros((8, 8))])
    prompt = np.zeros((300, 1), np.int64)
    for limit in ({"top_k": 3}, {"top_p": 0.3}):
        assert {*generate(flat, prompt, 1, **limit)[:, 0].tolist()} == {0, 1, 2}


def test_a_gpt_continues_bytes():
    model = gpt(256, 8, width=8, heads=2, blocks=1)
    assert generate(model, b"longer than its positions", 5).shape == (5,)


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (ConfigError, r"'mlp' takes 1 inputs and returns \(None, 3\)", {"model": mlp((4,), 3)}),
        (
            ConfigError,
            "'gpt' takes 3 inputs",
            {"model": gpt(10, 4, width=8, heads=2, blocks=1, packed=True)},
        ),
        (
            ConfigError,
            "causal model, .* but those of 'bert' change with the tokens after it",
            {"model": bert(10, 4, width=8, heads=2, blocks=1), "prompt": [1, 2, 3, 4, 5]},
        ),
        (ConfigError, "a length of at least 1 .* got 0", {"length": 0}),
        (ConfigError, "temperature of at least 0, got 1 and -1", {"temperature": -1}),
        (ConfigError, "top_k must be from 1 to 10, got 11", {"top_k": 11}),
        (ConfigError, "top_p must be above 0 and at most 1, got 1.5", {"top_p": 1.5}),
        (DataError, r"at least one token, got float64 of shape \(0,\)", {"prompt": []}),
        (DataError, r"from 0 to 9, .* got 3 to 10", {"prompt": [3, 10]}),
        (DataError, "got float64 of shape", {"prompt": [0.5]}),
    ],
)
def test_what_is_refused(error, message, arguments):
    arguments = {"model": counting(), "prompt": [1], "length": 1} | arguments
    with pytest.raises(error, match=message):
        generate(**arguments)
