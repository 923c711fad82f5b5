"""Data that need no network: packaged with ddl, or drawn when they are loaded."""

import csv
import io
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Literal, TypeAlias

import numpy as np

from ddl.data.readers.tokens import tokens
from ddl.data.source import Source
from ddl.errors import ConfigError, check_choice

Split: TypeAlias = Literal["train", "test"]

SPLITS = ("train", "test")

PENGUIN_CATEGORIES = {
    "species": ("Adelie", "Chinstrap", "Gentoo"),
    "island": ("Biscoe", "Dream", "Torgersen"),
    "sex": ("female", "male"),
}
"""The values of the penguins' categories, in the order of the integers that stand for them."""

SHAPES = ("disk", "square", "cross")
"""The kinds of shapes in the images of `shapes`."""

_FILES = resources.files("ddl.data.readers").joinpath("files")


def digits(split: Split) -> tuple[np.ndarray, np.ndarray]:
    """Loads the packaged handwritten digits: 1,797 small images of 10 classes.

    Alpaydin and Kaynak, 1998, CC BY 4.0. files/digits.txt documents source, licence and split.

    Args:
      split: "train" has 1,437 images, "test" the 360 held out.

    Returns:
      Images, uint8 [n, 8, 8, 1] with values from 0 to 16, and labels, int64 [n].

    Raises:
      ConfigError: If `split` is another.
    """
    check_choice("digits.split", split, SPLITS)
    with np.load(io.BytesIO(_FILES.joinpath("digits.npz").read_bytes())) as arrays:
        return arrays[f"{split}_image"], arrays[f"{split}_label"].astype(np.int64)


def penguins(split: Split, label: Literal["species", "body_mass"] = "species") -> Source:
    """Loads the packaged penguins: a table of numbers and categories of 333 birds.

    Gorman, Williams and Fraser 2014, CC0. files/penguins.txt documents source, licence and split.

    Args:
      split: "train" has 266 penguins, "test" the 67 held out.
      label: The feature to predict: "species", an integer from 0 to 2, or "body_mass" in kilograms.

    Returns:
      Features "numbers", float32 [4] (length and depth of the bill and length of the flipper in
      millimeters, body mass in kilograms), "island" and "sex", int64 [] as in
      `PENGUIN_CATEGORIES`, and "label", int64 []. For the body mass, "numbers" is [3] without it,
      there is a feature "species", int64 [], and "label" is float32 [].

    Raises:
      ConfigError: If `split` or `label` is another.
    """
    check_choice("penguins.split", split, SPLITS)
    check_choice("penguins.label", label, ("species", "body_mass"))
    lines = _FILES.joinpath("penguins.csv").read_text().splitlines()
    rows = [row for row in csv.DictReader(lines) if row["split"] == split]
    names = ("bill_length_mm", "bill_depth_mm", "flipper_length_mm", "body_mass_g")
    given = np.array([[row[name] for name in names] for row in rows], np.float64)
    numbers = (given / [1, 1, 1, 1000]).astype(np.float32)
    categories = {
        name: np.array([values.index(row[name]) for row in rows], np.int64)
        for name, values in PENGUIN_CATEGORIES.items()
    }
    if label == "body_mass":
        return Source({"numbers": numbers[:, :3], **categories, "label": numbers[:, 3]})
    return Source({"numbers": numbers, "label": categories.pop("species"), **categories})


def play(split: Split, length: int) -> Source:
    """Loads windows of the bytes of a packaged play, "Romeo and Juliet": 133,465 bytes.

    William Shakespeare, 1597, public domain. files/romeo_and_juliet.txt documents source, changes
    and split.

    Args:
      split: "train" has the first 90% of the play, "test" the rest.
      length: Bytes of a window.

    Returns:
      Features "token" and "next_token", both int64 [length]; see `ddl.data.tokens`.

    Raises:
      ConfigError: If `split` is another, or `length` is below 1.
      DataError: If the split has fewer than `length` + 1 bytes.
    """
    check_choice("play.split", split, SPLITS)
    content = _FILES.joinpath(f"romeo_and_juliet_{split}.txt").read_bytes()
    windows = tokens(np.frombuffer(content, np.uint8), length)
    return Source(windows.rows(np.arange(len(windows))))


def shapes(
    split: Split, label: Literal["pixels", "kinds"], *, size: int = 16, seed: int = 0
) -> Source:
    """Draws noisy images of a disk, a square and a cross, each of which is there or not.

    Each is in an image with probability 1/2, in its own place and brightness. Later ones cover
    earlier ones. Training has 2,000 images, the test 500; splits and seeds have their own.

    Args:
      split: "train" or "test".
      label: "pixels" for segmentation: the kind of each pixel, 0 for the background and 1 to 3 for
        `SHAPES`. "kinds" for several labels: whether each of the three is visible.
      size: Height and width of an image, at least 12.
      seed: Seed of the images.

    Returns:
      Features "image", uint8 [size, size, 1], and "label", int64 [size, size] or bool [3].

    Raises:
      ConfigError: If an argument is out of range.
    """
    check_choice("shapes.split", split, SPLITS)
    check_choice("shapes.label", label, ("pixels", "kinds"))
    count = 2000 if split == "train" else 500
    if size < 12:
        raise ConfigError(f"shapes.size must be at least 12, got {size}.")
    random = generator(seed, SPLITS.index(split))
    pixels = np.zeros((count, size, size), np.int64)
    brightness = np.zeros((count, size, size), np.float32)
    row, column = np.mgrid[:size, :size]
    for kind, name in enumerate(SHAPES, 1):
        present = random.random(count) < 0.5
        radius = random.integers(2, size // 4, count)[:, np.newaxis, np.newaxis]
        center = random.integers(3, size - 3, (2, count))[..., np.newaxis, np.newaxis]
        down, right = np.abs(row - center[0]), np.abs(column - center[1])
        inside = {
            "disk": down**2 + right**2 <= radius**2,
            "square": np.maximum(down, right) < radius,
            "cross": (np.minimum(down, right) == 0) & (np.maximum(down, right) <= radius),
        }[name]
        inside &= present[:, np.newaxis, np.newaxis]
        shade = random.uniform(80, 180, count)[:, np.newaxis, np.newaxis]
        brightness = np.where(inside, shade, brightness)
        pixels[inside] = kind
    noise = random.normal(0, 30, pixels.shape)
    image = np.clip(brightness + 40 + noise, 0, 255).astype(np.uint8)[..., np.newaxis]
    if label == "pixels":
        return Source({"image": image, "label": pixels})
    visible = [(pixels == kind).any(axis=(1, 2)) for kind in range(1, len(SHAPES) + 1)]
    return Source({"image": image, "label": np.stack(visible, axis=1)})


def synthetic(
    features: Mapping[str, tuple[Sequence[int], str] | tuple[Sequence[int], str, int]],
    num_examples: int,
    *,
    seed: int = 0,
) -> Source:
    """Draws random features of any shape, for benchmarks and tests. There is nothing to learn.

        ddl.data.synthetic({"image": ((32, 32, 3), "uint8"), "label": ((), "int64")}, 1000)

    Args:
      features: Shape and dtype of each feature of one example; of integers also the number of
        values, by default 128: `((), "int64", 1000)`. Floats are normal, booleans true or false,
        and integers from 0 on.
      num_examples: Number of examples.
      seed: Seed of all features.

    Raises:
      ConfigError: If a dtype is not a float, integer or boolean, or a number of values is not
        positive, exceeds those of the dtype, or is given for others than integers.
      DataError: If there are no examples.
    """
    random = generator(seed, 3)
    arrays = {}
    for name, (shape, dtype, *values) in features.items():
        size, kind = (num_examples, *shape), np.dtype(dtype).kind
        most = np.iinfo(dtype).max + 1 if kind in "iu" else 0
        if kind not in "fiub" or (values and not 1 <= values[0] <= most):
            raise ConfigError(
                "synthetic.features must be floats, booleans or integers, of which a positive "
                f"number of values may follow, got {[dtype, *values]} for {name!r}."
            )
        if kind == "f":
            arrays[name] = random.standard_normal(size, np.float32).astype(dtype)
        else:
            count = 2 if kind == "b" else [*values, 128][0]
            arrays[name] = random.integers(0, count, size, np.int64).astype(dtype)
    return Source(arrays)


def generator(seed: int, stream: int) -> np.random.Generator:
    """Returns a generator of random numbers; seeds and streams have numbers of their own."""
    return np.random.Generator(np.random.Philox(key=np.array([seed % 2**64, stream], np.uint64)))
