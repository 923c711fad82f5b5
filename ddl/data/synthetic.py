"""Synthetic data of any shape, reproducible by seed, for benchmarks and tests."""

import math
import os
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from ddl.data.arrays import ArraySource
from ddl.errors import ConfigError

_NOISE = 0.25
_CHUNK_VALUES = 1 << 22
_STREAMS = {"prototypes": 0, "train": 1, "test": 2, "arrays": 3}


def synthetic_images(
    split: Literal["train", "test"],
    *,
    image_shape: Sequence[int],
    num_classes: int,
    num_examples: int,
    seed: int = 0,
    dtype: Literal["uint8", "float32"] = "uint8",
) -> tuple[np.ndarray, np.ndarray]:
    """Generates noisy copies of one random prototype per class: easy to learn, not trivial.

    Both splits share the prototypes; labels and noise differ.

    Args:
      split: "train" or "test".
      image_shape: Shape of one image, usually height, width, channels.
      num_classes: Number of classes; labels range from 0 to num_classes - 1.
      num_examples: n. A smaller number gives a prefix of a larger one.
      seed: Seed of prototypes, labels and noise.
      dtype: uint8 images have values from 0 to 255, float32 images from 0 to 1.

    Returns:
      Images [n, *image_shape] of `dtype`, and labels, int64 [n].

    Raises:
      ConfigError: If a size is not positive, or the images need more memory than there is.
    """
    sizes = {"num_classes": num_classes, "num_examples": num_examples}
    for name, size in {**sizes, "image_shape": min(image_shape, default=1)}.items():
        if size < 1:
            raise ConfigError(f"{name} of the synthetic images must be at least 1, got {size}.")
    shape = tuple(image_shape)
    _check_memory("images", num_examples * math.prod(shape) * np.dtype(dtype).itemsize)
    prototypes = _generator(seed, "prototypes").random((num_classes, *shape), np.float32)
    generator = _generator(seed, split)
    images = np.empty((num_examples, *shape), dtype)
    labels = np.empty(num_examples, np.int64)
    # Chunks of fixed length bound the memory and make a smaller data set a prefix of a larger one.
    rows = max(1, _CHUNK_VALUES // prototypes[0].size)
    for start in range(0, num_examples, rows):
        count = min(rows, num_examples - start)
        labels[start : start + count] = generator.integers(0, num_classes, rows)[:count]
        noise = generator.standard_normal((count, *shape), np.float32)
        values = prototypes[labels[start : start + count]] + _NOISE * noise
        np.clip(values, 0, 1, out=values)
        images[start : start + count] = values * 255 if dtype == "uint8" else values
    return images, labels


def synthetic_arrays(
    elements: Mapping[str, tuple[Sequence[int], str]],
    num_examples: int,
    seed: int = 0,
    below: Mapping[str, int] | None = None,
) -> ArraySource:
    """Generates random features of any shapes and dtypes, without a learnable relation.

    Args:
      elements: Shape of one example and dtype name, by feature name. Floats are drawn from the
        standard normal distribution, integers uniformly from 0 to 127, booleans with probability
        1/2.
      num_examples: Number of examples.
      seed: Seed of all features.
      below: Number of values of integer features that have others than 128, by feature name.

    Raises:
      ConfigError: If `num_examples` is not positive, a dtype is not a float, integer or boolean,
        or `below` names no integer feature or a number that is not positive; or if the features
        need more memory than there is.
    """
    below = dict(below or {})
    for name, count in below.items():
        if name not in elements or np.dtype(elements[name][1]).kind not in "iu" or count < 1:
            raise ConfigError(
                "synthetic_arrays.below must give the number of values, at least 1, of integer "
                f"features, got {count} for {name!r}. The features are {', '.join(elements)}."
            )
    if num_examples < 1:
        raise ConfigError(
            f"num_examples of the synthetic data must be at least 1, got {num_examples}."
        )
    sizes = (math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in elements.values())
    _check_memory("data", num_examples * sum(sizes))
    generator = _generator(seed, "arrays")
    features = {}
    for name, (shape, dtype_name) in elements.items():
        size = (num_examples, *shape)
        kind = np.dtype(dtype_name).kind
        if kind == "f":
            features[name] = generator.standard_normal(size, np.float32).astype(dtype_name)
        elif name in below:
            features[name] = generator.integers(0, below[name], size, np.int64).astype(dtype_name)
        elif kind in "iu":
            features[name] = generator.integers(0, 128, size, np.uint8).astype(dtype_name)
        elif kind == "b":
            features[name] = generator.random(size) < 0.5
        else:
            raise ConfigError(
                f"Feature {name!r} of the synthetic data must be a float, integer or boolean, got "
                f"{dtype_name}."
            )
    return ArraySource(features)


def _check_memory(what: str, needed: int) -> None:
    """Raises ConfigError if this machine cannot hold the data."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > memory:
        raise ConfigError(
            f"num_examples of the synthetic {what} is too large: they need {needed / 1e9:,.1f} GB, "
            f"but this machine has {memory / 1e9:,.1f} GB of memory. Set a smaller num_examples."
        )


def _generator(seed: int, stream: str) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=[seed % 2**64, _STREAMS[stream]]))
