"""Digits shifted by up to a pixel: any number of copies of the 1,797 included in ddl."""

import functools

import numpy as np

import ddl


def moved(images: np.ndarray, labels: np.ndarray, count: int, seed: int) -> tuple:
    """Returns copies of images, each shifted by up to a pixel in each direction, interpolated.

    Args:
      images: uint8 [n, 8, 8, 1] from 0 to 16.
      labels: int [n].
      count: Number of copies; the copies of any two images differ by at most one.
      seed: Seed of the shifts and of the order.

    Returns:
      uint8 [count, 8, 8, 1] from 0 to 255, and the labels [count].
    """
    random = np.random.default_rng(seed)
    rounds = -(-count // len(images))
    which = np.concatenate([random.permutation(len(images)) for _ in range(rounds)])[:count]
    offset = random.uniform(-1, 1, (count, 2, 1, 1))
    whole = np.floor(offset).astype(int)
    part = offset - whole
    padded = np.pad(images[which, ..., 0] * 15.9375, ((0, 0), (2, 2), (2, 2)))
    pixel = np.arange(8) + 2
    result = np.zeros((count, 8, 8))
    for down in (0, 1):
        for across in (0, 1):
            rows = pixel[None, :, None] + whole[:, 0] + down
            columns = pixel[None, None, :] + whole[:, 1] + across
            share = (part if down else 1 - part)[:, 0] * (part if across else 1 - part)[:, 1]
            result += share * padded[np.arange(count)[:, None, None], rows, columns]
    return np.round(result).astype(np.uint8)[..., np.newaxis], labels[which]


@functools.cache
def data(examples: int, test_examples: int, tuning: bool) -> tuple[tuple, tuple]:
    """Returns training and evaluation data; in tuning, both come from the training images."""
    images, labels = ddl.data.digits("train")
    held_out = ddl.data.digits("test")
    if tuning:
        order = np.random.default_rng(7).permutation(len(images))
        images, labels = images[order], labels[order]
        held_out = images[-240:], labels[-240:]
        images, labels = images[:-240], labels[:-240]
    return moved(images, labels, examples, 1), moved(*held_out, test_examples, 2)
