"""Operations of RandAugment on images of 256 levels, as Pillow's, rounded to the nearest level.

Levels are whole numbers from 0 to 255, float32 [batch, height, width, channels].
"""

import keras
import tensorflow as tf

from ddl.layers.transforms.color_jitter import luma

_LEVELS = 256
_MIDDLE = 128.0


def counts_of_levels(levels: tf.Tensor) -> tf.Tensor:
    """Returns how many pixels of each channel have each level, float32 [batch, channels, 256]."""
    batch, _, _, channels = keras.ops.shape(levels)
    places = tf.reshape(_places(levels), [-1])
    counts = tf.math.unsorted_segment_sum(
        tf.ones_like(places, tf.float32), places, batch * channels * _LEVELS
    )
    return tf.reshape(counts, [batch, channels, _LEVELS])


def looked_up(levels: tf.Tensor, tables: tf.Tensor) -> tf.Tensor:
    """Replaces levels by those of tables, float32 [batch, channels, 256]."""
    return tf.gather(tf.reshape(tables, [-1]), _places(levels))


def _places(levels: tf.Tensor) -> tf.Tensor:
    """Returns the places of levels in tables [batch, channels, 256], int64."""
    batch, _, _, channels = keras.ops.shape(levels)
    first = tf.range(tf.cast(batch * channels, tf.int64)) * _LEVELS
    return tf.cast(levels, tf.int64) + tf.reshape(first, [batch, 1, 1, channels])


def autocontrast_table(counts: tf.Tensor) -> tf.Tensor:
    """Stretches the levels of each channel so that the least becomes 0 and the largest 255.

    Args:
      counts: The result of `counts_of_levels`.

    Returns:
      The new level for each level, float32 [batch, channels, 256].
    """
    level = tf.range(_LEVELS, dtype=tf.float32)
    found = counts > 0
    low = tf.reduce_min(tf.where(found, level, 255.0), axis=-1, keepdims=True)
    high = tf.reduce_max(tf.where(found, level, 0.0), axis=-1, keepdims=True)
    stretched = tf.round((level - low) * (255 / tf.maximum(high - low, 1.0)))
    return tf.where(high > low, tf.clip_by_value(stretched, 0.0, 255.0), level)


def equalizing_table(counts: tf.Tensor) -> tf.Tensor:
    """Spreads the levels of each channel so that all are equally frequent, as far as possible.

    Args:
      counts: The result of `counts_of_levels`.

    Returns:
      The new level for each level, float32 [batch, channels, 256].
    """
    level = tf.range(_LEVELS, dtype=tf.float32)
    pixels = tf.reduce_sum(counts, axis=-1, keepdims=True)
    last = tf.reduce_max(tf.where(counts > 0, level, 0.0), axis=-1, keepdims=True)
    of_last = tf.reduce_sum(tf.where(level == last, counts, 0.0), axis=-1, keepdims=True)
    step = tf.floor((pixels - of_last) / 255)
    before = tf.cumsum(counts, axis=-1, exclusive=True)
    spread = tf.floor((tf.floor(step / 2) + before) / tf.maximum(step, 1.0))
    return tf.where(step > 0, tf.minimum(spread, 255.0), level)


def grey(levels: tf.Tensor) -> tf.Tensor:
    """Returns the luma of colours, rounded: float32 [batch, height, width, 1]."""
    return tf.round(luma(levels))


def smoothed(levels: tf.Tensor) -> tf.Tensor:
    """Averages each pixel, of weight 5, with its 8 neighbours; the border stays."""
    _, height, width, _ = keras.ops.shape(levels)
    padded = tf.pad(levels, [[0, 0], [1, 1], [1, 1], [0, 0]])
    rows = padded[:, :-2] + padded[:, 1:-1] + padded[:, 2:]
    total = rows[:, :, :-2] + rows[:, :, 1:-1] + rows[:, :, 2:]
    edges = []
    for size in (as_float(height), as_float(width)):
        place = tf.range(size)
        edges.append((place == 0) | (place == size - 1))
    is_border = edges[0][:, tf.newaxis, tf.newaxis] | edges[1][:, tf.newaxis]
    return tf.where(is_border, levels, tf.round((total + 4 * levels) / 13))


def as_float(size: int | tf.Tensor) -> float | tf.Tensor:
    """Returns a size as a float32; TensorFlow computes with int32 on the host."""
    return float(size) if isinstance(size, int) else tf.cast(size, tf.float32)


def moved(
    levels: tf.Tensor,
    *,
    y_y: tf.Tensor,
    y_x: tf.Tensor,
    y_0: tf.Tensor,
    x_y: tf.Tensor,
    x_x: tf.Tensor,
    x_0: tf.Tensor,
) -> tf.Tensor:
    """Takes each pixel from the nearest one to a place, and the middle level outside of the image.

    Args:
      levels: The images.
      y_y: Rows by which the place moves for each row; all of these are float32 [batch].
      y_x: Rows for each column.
      y_0: Row for the upper left corner of the image.
      x_y: Columns for each row.
      x_x: Columns for each column.
      x_0: Column for the upper left corner.
    """
    batch, height, width, channels = keras.ops.shape(levels)
    rows, columns = as_float(height), as_float(width)
    y = (tf.range(rows) + 0.5)[:, tf.newaxis]
    x = tf.range(columns) + 0.5

    def place(by_y: tf.Tensor, by_x: tf.Tensor, start: tf.Tensor) -> tf.Tensor:
        by_y, by_x, start = (each[:, tf.newaxis, tf.newaxis] for each in (by_y, by_x, start))
        return tf.floor(by_y * y + by_x * x + start)

    row, column = place(y_y, y_x, y_0), place(x_y, x_x, x_0)
    inside = (row >= 0) & (row < rows) & (column >= 0) & (column < columns)
    # A place outside of the image reads its first pixel, which is not used.
    within = tf.where(inside, row * columns + column, tf.zeros([]))
    first = tf.range(tf.cast(batch, tf.int64)) * tf.cast(rows * columns, tf.int64)
    pixels = tf.reshape(levels, [-1, channels])
    found = tf.gather(pixels, tf.cast(within, tf.int64) + first[:, tf.newaxis, tf.newaxis])
    return tf.where(inside[..., tf.newaxis], found, _MIDDLE)
