"""Images of simple shapes that are drawn when they are loaded, and need no network."""

from typing import Literal

import numpy as np

from ddl.data.arrays import ArraySource
from ddl.data.synthetic import synthetic_arrays
from ddl.errors import ConfigError, check_choice

KINDS = ("disk", "square", "cross")

_EXAMPLES = {"train": 2000, "test": 500}
_STREAMS = {"train": 0, "test": 1}
_SMALLEST = 12


def shapes(
    split: Literal["train", "test"],
    label: Literal["pixels", "kinds"],
    *,
    size: int = 16,
    num_examples: int | None = None,
    seed: int = 0,
    name: Literal["shapes", "synthetic"] = "shapes",
) -> ArraySource:
    """Draws noisy images of a disk, a square and a cross, each of which is there or not.

    Each is in an image with probability 1/2, in its own place and brightness. Later ones cover
    earlier ones. Splits and seeds have images of their own.

    Args:
      split: "train" or "test".
      label: "pixels" for segmentation: the kind of each pixel, 0 for the background and 1 to 3 for
        disk, square and cross. "kinds" for several labels: whether each of the three is visible.
      size: Height and width of an image, at least 12.
      num_examples: Number of images; None draws 2,000 for training and 500 for the test.
      seed: Seed of the images.
      name: "shapes", or "synthetic" for random pixels and labels, without a relation.

    Returns:
      Features "image", uint8 [n, size, size, 1], and "label", int64 [n, size, size] or bool [n, 3].

    Raises:
      ConfigError: If an argument is out of range.
    """
    check_choice("shapes.split", split, tuple(_EXAMPLES))
    check_choice("shapes.label", label, ("pixels", "kinds"))
    check_choice("shapes.name", name, ("shapes", "synthetic"))
    count = _EXAMPLES[split] if num_examples is None else num_examples
    if size < _SMALLEST or count < 1:
        raise ConfigError(
            f"shapes.size must be at least {_SMALLEST} and shapes.num_examples at least 1, or "
            f"None, got {size} and {count}."
        )
    if name == "synthetic":
        of_pixels = label == "pixels"
        elements = {
            "image": ((size, size, 1), "uint8"),
            "label": ((size, size), "int64") if of_pixels else ((len(KINDS),), "bool"),
        }
        below = {"image": 256, "label": len(KINDS) + 1} if of_pixels else {"image": 256}
        own_seed = len(_STREAMS) * seed + _STREAMS[split]
        return synthetic_arrays(elements, count, own_seed, below=below)
    random = np.random.Generator(np.random.Philox(key=[seed % 2**64, _STREAMS[split]]))
    pixels = np.zeros((count, size, size), np.int64)
    brightness = np.zeros((count, size, size), np.float32)
    row, column = np.mgrid[:size, :size]
    for kind in range(1, len(KINDS) + 1):
        present = random.random(count) < 0.5
        radius = random.integers(2, size // 4, count)[:, np.newaxis, np.newaxis]
        centre = random.integers(3, size - 3, (2, count))[..., np.newaxis, np.newaxis]
        down, right = np.abs(row - centre[0]), np.abs(column - centre[1])
        if kind == 1:
            inside = down**2 + right**2 <= radius**2
        elif kind == 2:
            inside = np.maximum(down, right) < radius
        else:
            inside = (np.minimum(down, right) == 0) & (np.maximum(down, right) <= radius)
        inside &= present[:, np.newaxis, np.newaxis]
        shade = random.uniform(80, 180, count)[:, np.newaxis, np.newaxis]
        brightness = np.where(inside, shade, brightness)
        pixels[inside] = kind
    noise = random.normal(0, 30, pixels.shape)
    images = np.clip(brightness + 40 + noise, 0, 255).astype(np.uint8)[..., np.newaxis]
    if label == "pixels":
        return ArraySource(image=images, label=pixels)
    visible = [(pixels == kind).any(axis=(1, 2)) for kind in range(1, len(KINDS) + 1)]
    return ArraySource(image=images, label=np.stack(visible, axis=1))
