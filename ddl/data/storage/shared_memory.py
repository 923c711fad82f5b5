"""Arrays and tensors that share memory."""

import numpy as np
import tensorflow as tf

_ALIGNMENT = 64
"""TensorFlow takes an array over without a copy if it begins at a multiple of these bytes."""


def aligned_empty(shape: list[int], dtype: np.dtype | type) -> np.ndarray:
    """Returns an array without initial values, which TensorFlow takes over without a copy.

    Args:
      shape: Its shape.
      dtype: Its dtype; arrays of Python objects are always copied.
    """
    kind = np.dtype(dtype)
    if kind.hasobject:
        return np.empty(shape, kind)
    size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % _ALIGNMENT
    return memory[first : first + size].view(kind).reshape(shape)


def shared_tensor(array: np.ndarray) -> tf.Tensor | None:
    """Returns a tensor in the memory of an array, such as a mapped file; None if it cannot be.

    `tf.constant` would read and copy the whole array.

    Args:
      array: Numbers of a dtype that TensorFlow has. They must not change.
    """
    plain = np.asarray(array)
    is_aligned = plain.ctypes.data % _ALIGNMENT == 0 and plain.flags.c_contiguous
    if not is_aligned or plain.dtype.kind not in "biufc" or not plain.dtype.isnative:
        return None
    # A graph captures eager tensors by reference.
    with tf.init_scope(), tf.device("CPU:0"):
        if not _shares():
            return None
        tensor = tf.raw_ops.Identity(input=plain)
    tensor._is_in_memory_of_array = True
    return tensor


def is_shared(tensor: tf.Tensor) -> bool:
    """Returns whether `shared_tensor` made a tensor, so that other machines do not have it."""
    return getattr(tensor, "_is_in_memory_of_array", False)


def _shares() -> bool:
    """Returns whether TensorFlow takes over an aligned array; a version might copy it."""
    probe = aligned_empty([16], np.float32)
    probe[:] = 0
    tensor = tf.raw_ops.Identity(input=probe)
    probe[0] = 1
    return bool(tensor.numpy()[0] == 1)
