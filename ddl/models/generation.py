"""Use of trained models: tokens drawn from language models, and exported models loaded."""

import math
import os

import keras
import numpy as np
import tensorflow as tf

import ddl.layers  # noqa: F401 (registers the layers that a file may name)
from ddl.errors import ConfigError, DataError


def generate(
    model: keras.Model,
    prompt: np.ndarray | bytes,
    length: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
) -> np.ndarray:
    """Continues token sequences, each token drawn given those before it. Eager, one device.

    The model sees at most as many tokens as it has positions: the last ones. The same model, prompt
    and seed give the same tokens, up to ties by rounding.

    Args:
      model: Maps tokens [batch, positions] to logits [batch, positions, vocabulary], those of a
        position depending on tokens up to it, such as `ddl.models.gpt`.
      prompt: Tokens to continue, integer [rows, n] or [n], n of at least 1; or bytes, whose values
        are the tokens.
      length: Number of tokens to draw.
      temperature: Divisor of the logits; 0 takes the likeliest token.
      top_k: If given, only the `top_k` likeliest tokens can be drawn, of equally likely ones those
        of smaller number (Fan et al. 2018, "Hierarchical Neural Story Generation").
      top_p: If given, only the fewest likeliest tokens can be drawn that together have at least
        this probability, after temperature and `top_k` (Holtzman et al. 2020, "The Curious Case of
        Neural Text Degeneration").
      seed: Seed of the draws.

    Returns:
      The drawn tokens, int64 [rows, length]; [length] if the prompt has no rows.

    Raises:
      ConfigError: If an argument is out of range, the model has another form, or its logits depend
        on later tokens, as those of `ddl.models.bert`.
      DataError: If the prompt is empty, or holds a token outside of the vocabulary.

    Example:
      >>> model = ddl.models.gpt(256, 64, width=128, heads=4, blocks=2)
      >>> print(bytes(generate(model, b"ROMEO:", 20).astype("u1")))
    """
    count = len(getattr(model, "inputs", None) or ())
    shape = model.output_shape if count == 1 else None
    if not isinstance(shape, tuple) or len(shape) != 3 or shape[1] is None:
        raise ConfigError(
            "generate needs a model from tokens [batch, positions] to logits [batch, positions, "
            f"vocabulary], such as ddl.models.gpt(…, packed=False), but {model.name!r} takes "
            f"{count} inputs and returns {shape}."
        )
    _, positions, vocabulary = shape
    if length < 1 or not (math.isfinite(temperature) and temperature >= 0):
        raise ConfigError(
            "generate needs a length of at least 1 and a temperature of at least 0, got "
            f"{length} and {temperature}."
        )
    if top_k is not None and not 1 <= top_k <= vocabulary:
        raise ConfigError(f"generate.top_k must be from 1 to {vocabulary}, got {top_k}.")
    if top_p is not None and not 0 < top_p <= 1:
        raise ConfigError(f"generate.top_p must be above 0 and at most 1, got {top_p}.")
    given = np.frombuffer(prompt, np.uint8) if isinstance(prompt, bytes) else np.asarray(prompt)
    if not given.size or given.ndim not in (1, 2) or given.dtype.kind not in "iu":
        raise DataError(
            f"The prompt must be tokens [rows, n] with at least one token, got {given.dtype} of "
            f"shape {given.shape}. Pass rows of integers of one length, such as [[1, 2, 3]]."
        )
    if given.min() < 0 or given.max() >= vocabulary:
        raise DataError(
            f"The tokens of the prompt must be from 0 to {vocabulary - 1}, the vocabulary of "
            f"{model.name!r}, got {given.min()} to {given.max()}. Encode the prompt as the "
            "training data were encoded."
        )
    tokens = np.atleast_2d(given).astype(np.int64)
    _check_causal(model, tokens[:1, :1], positions, vocabulary)
    kept = 1 if temperature == 0 else top_k or vocabulary

    @tf.function(autograph=False)
    def drawn(window: tf.Tensor, last: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
        logits = tf.cast(tf.gather(model(window, training=False), last, axis=1), tf.float32)
        logits, likeliest = tf.math.top_k(logits / (temperature or 1.0), kept)
        if top_p is not None:
            before = tf.cumsum(tf.nn.softmax(logits), axis=-1, exclusive=True)
            logits = tf.where(before < top_p, logits, -math.inf)
        key = tf.stack([tf.constant(seed % 2**63, tf.int64), number])
        indices = tf.random.stateless_categorical(logits, 1, key)
        return tf.gather(likeliest, indices, batch_dims=1)

    for number in range(length):
        recent = tokens[:, -positions:]
        window = np.pad(recent, [(0, 0), (0, positions - recent.shape[1])])  # padding comes after
        last, position = tf.constant(recent.shape[1] - 1), tf.constant(number, tf.int64)
        new = drawn(tf.constant(window), last, position).numpy()
        tokens = np.concatenate([tokens, new], axis=1)
    found = tokens[:, -length:]
    return found if given.ndim == 2 else found[0]


def _check_causal(model: keras.Model, token: np.ndarray, positions: int, vocabulary: int) -> None:
    """Raises ConfigError if the logits of the first position depend on the tokens after it."""
    padding = [(0, 0), (0, positions - 1)]
    windows = [np.pad(token, padding, constant_values=x) for x in (0, vocabulary - 1)]
    # In two calls: the rows of one batch may be rounded differently.
    values, others = (np.asarray(model(x, training=False)[0, 0], np.float32) for x in windows)
    if np.abs(values - others).max() > 1e-4 * np.abs(values).max():
        raise ConfigError(
            "generate needs a causal model, in which the logits of a position depend only on the "
            f"tokens up to it, but those of {model.name!r} change with the tokens after it. Use "
            "a model such as ddl.models.gpt, or give the attention a causal mask."
        )


def load_exported(path: str | os.PathLike[str]) -> keras.Model:
    """Loads the `model.keras` of an export, with its weights, such as a teacher.

    Args:
      path: Path of the file; see `--mode=export`.

    Raises:
      ConfigError: If there is no such file, or Keras cannot load it.
    """
    if not os.path.isfile(path):
        raise ConfigError(
            f"load_exported.path must be a .keras file, but {path} does not exist. Export the run "
            "with --mode=export, which writes export/model.keras into its directory."
        )
    try:
        return keras.models.load_model(path, compile=False)
    except (ValueError, TypeError, OSError, KeyError) as error:
        raise ConfigError(
            f"{path} could not be loaded: {error} Import the module that defines its layers in the "
            "config, or save the model again."
        ) from error
