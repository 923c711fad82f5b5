"""Measures of generated digits: by a classifier of real ones, and beside the test digits."""

from collections.abc import Mapping

import keras
import numpy as np

import ddl
from benchmarks.report import Images, Table

COUNT = 1437
"""Number of digits to generate: that of the training digits."""

_SHOWN = 30


def digits(split: str) -> np.ndarray:
    """Returns the real digits of a split, float32 [n, 8, 8, 1] from 0 to 1."""
    return ddl.data.digits(split)[0].astype(np.float32) / 16


def generated(model: keras.Model) -> np.ndarray:
    """Returns digits of a generator or decoder for normal noise, float32 [COUNT, 8, 8, 1]."""
    noise = np.random.default_rng(0).normal(size=(COUNT, model.input_shape[-1]))
    return model.predict(noise.astype(np.float32), verbose=0)


def independent_pixels() -> np.ndarray:
    """Returns images whose pixels are drawn one by one, each from that of any training digit."""
    real = digits("train").reshape(-1, 64)
    rows = np.random.default_rng(0).integers(len(real), size=(COUNT, 64))
    return real[rows, np.arange(64)].reshape(-1, 8, 8, 1)


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """Returns the Fréchet distance of two sets of features, [n, width] and [m, width].

    The sets are taken as normal distributions, as in the Fréchet inception distance (Heusel et al.
    2017).
    """
    means = [features.mean(axis=0) for features in (one, other)]
    first, second = (np.cov(features, rowvar=False) for features in (one, other))
    root = _root(first)
    shared = np.trace(_root(root @ second @ root))
    return float(np.sum((means[0] - means[1]) ** 2) + np.trace(first + second) - 2 * shared)


def _root(matrix: np.ndarray) -> np.ndarray:
    """Returns the square root of a symmetric positive semidefinite matrix."""
    values, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
    return (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T


def table(sources: Mapping[str, np.ndarray], classifier: keras.Model) -> Table:
    """Returns a table of sets of digits.

    Args:
      sources: Digits by the name of their source, float32 [n, 8, 8, 1] from 0 to 1.
      classifier: Maps digits from 0 to 16 to logits; its last hidden layer gives the features.
    """
    both = keras.Model(classifier.input, [classifier.layers[-2].output, classifier.output])

    def seen(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        features, logits = both.predict(images * 16, verbose=0)
        return features.astype(np.float64), np.exp(logits - logits.max(axis=-1, keepdims=True))

    real, _ = seen(digits("test"))
    rows = []
    for name, images in sources.items():
        features, odds = seen(images)
        confidence = float(np.mean(1 / odds.sum(axis=-1)))
        shares = np.bincount(odds.argmax(axis=-1), minlength=10) / len(odds)
        entropy = -np.sum(shares[shares > 0] * np.log(shares[shares > 0]))
        distant = distance(features, real)
        rows.append([name, distant, 100 * confidence, float(np.exp(entropy))])
    columns = ["source", "Fréchet distance to the test digits", "confidence, %", "digits drawn"]
    return Table("Generated digits, as a classifier of real digits sees them", columns, rows)


def shown(name: str, images: np.ndarray) -> Images:
    """Returns the first images of a set, for the picture."""
    values = np.clip(np.round(images[:_SHOWN] * 15), 0, 15).astype(int)
    return Images(name, ["".join(f"{v:x}" for v in image.ravel()) for image in values])
