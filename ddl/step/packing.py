"""Few kernels on GPUs: many small tensors in one buffer.

A GPU takes a few microseconds to start a kernel, whether for a bias or for a million entries. An
operation on each of a model's hundreds of variables is therefore made once, on a buffer that holds
all small ones. Large tensors stay alone: copying them into a buffer would take longer than it
saves. CPUs start an operation faster than they copy, so they work on each tensor.

An operation on each entry gives the same bits in a buffer. A sum over all entries adds in another
order.
"""

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from ddl import microbatch

FEWEST = 16
"""Fewest tensors of a buffer. TensorFlow joins and splits fewer of them one by one."""

_FEWEST_SHARED = 3
"""Fewest tensors of a buffer on which several operations work, which then outweigh the copies."""

_LARGE = 2**20  # entries of a tensor that stays alone
_LARGEST_BUFFER = 2**24  # entries; buffers take additional memory
_ROW = 1024
# ResourceHandle::ANONYMOUS_NAME of TensorFlow: each execution creates a new variable. A name drawn
# at trace time would be shared by all workers of parameter servers, which share a trace.
_ANONYMOUS = "cd2c89b7-88b7-44c8-ad83-06c2a9158347"
_BUFFER = "_ddl_buffer"  # attribute of a symbolic tensor; see `_remember`
_ALIGNED = 64  # bytes: parts of a buffer that begin at a multiple are shared, not copied


def zero_variable(like: tf.Tensor) -> tf.Tensor:
    """Returns the handle of a new variable of zeros on the current device. In a graph.

    Each execution makes another one; `tf.raw_ops.DestroyResourceOp` ends it.

    Args:
      like: Has the shape and dtype of the variable.
    """
    # Not tf.zeros: TensorFlow would keep it as a constant, and copy it in each update.
    zeros = tf.raw_ops.Empty(shape=like.shape.as_list(), dtype=like.dtype, init=True)
    return new_variable(zeros, like.shape)


def new_variable(value: tf.Tensor, shape: tf.TensorShape | None = None) -> tf.Tensor:
    """Returns the handle of a new variable on the current device; see `zero_variable`.

    Args:
      value: Its first value.
      shape: Its static shape; None takes that of `value`, which need not be fully known.
    """
    static = value.shape if shape is None else shape
    handle = tf.raw_ops.VarHandleOp(dtype=value.dtype, shape=static, shared_name=_ANONYMOUS)
    tf.raw_ops.AssignVariableOp(resource=handle, value=value)
    return handle


class Packed:
    """Tensors in few buffers, for operations on each entry.

    Attributes:
      places: Places of the tensors of each buffer.
      buffers: A tensor that stays alone, or a vector of several tensors of one dtype.
    """

    def __init__(self, tensors: Sequence[tf.Tensor], shared: bool = False):
        """Packs tensors; those of unknown shape stay alone, and all in what XLA compiles.

        Args:
          tensors: The tensors.
          shared: Whether several operations follow, each on what the one before returned. Few
            tensors are then packed too. Their buffer is found again: tensors that were packed or
            unpacked together are packed without a copy.
        """
        self._tensors = list(tensors)
        alone = [[place] for place in range(len(self._tensors))]
        self.places = alone if microbatch.is_compiled() else groups(self._tensors)
        if shared and not microbatch.is_compiled():
            self.places = _with_few(self.places, self._tensors)
        self.buffers = self.alike(self._tensors)

    def alike(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Packs other tensors of the same shapes and of one dtype in the same way."""
        return [_joined([tensors[place] for place in group]) for group in self.places]

    def unpacked(self, buffers: Sequence[tf.Tensor], to_keep: bool = False) -> list[tf.Tensor]:
        """Returns the tensors that lie in buffers, in their own order and shapes.

        Args:
          buffers: One for each of `self.buffers`, of its shape.
          to_keep: Whether variables will hold the tensors. They are then copied here, at once; else
            a variable would copy its part of the buffer itself.
        """
        found: list[tf.Tensor] = list(self._tensors)
        for group, buffer in zip(self.places, buffers, strict=True):
            if len(group) == 1:
                found[group[0]] = buffer
                continue
            shapes = [self._tensors[place].shape for place in group]
            sizes = [shape.num_elements() for shape in shapes]
            if len(group) < FEWEST:  # slices share memory where they are aligned
                ends = np.cumsum(sizes).tolist()
                parts = [buffer[end - size : end] for end, size in zip(ends, sizes, strict=True)]
            elif to_keep:
                parts = tf.split(buffer[tf.newaxis], sizes, 1)
            else:
                parts = tf.split(buffer, sizes)
            own = [tf.reshape(part, shape) for part, shape in zip(parts, shapes, strict=True)]
            _remember(buffer, own)
            for place, part in zip(group, own, strict=True):
                found[place] = part
        return found

    def each(self, function: Callable[[tf.Tensor], tf.Tensor]) -> list[tf.Tensor]:
        """Returns the tensors after a function of each entry."""
        return self.unpacked([function(buffer) for buffer in self.buffers])


def groups(tensors: Sequence[tf.Tensor]) -> list[list[int]]:
    """Returns the places of the tensors that share a buffer, and of each that stays alone."""
    found: list[list[int]] = []
    filling: dict[tuple[tf.DType, bool], tuple[list[int], int]] = {}
    for place, tensor in enumerate(tensors):
        size = tensor.shape.num_elements()
        if size is None or size >= _LARGE:
            found.append([place])
            continue
        kind = tensor.dtype, size * tensor.dtype.size % _ALIGNED == 0
        group, held = filling.get(kind, ([], 0))
        if not group or held + size > _LARGEST_BUFFER:
            group, held = [], 0
            found.append(group)
        group.append(place)
        filling[kind] = (group, held + size)
    return [
        part
        for group in found
        for part in ([group] if len(group) >= FEWEST else [[place] for place in group])
    ]


def _with_few(places: Sequence[list[int]], tensors: Sequence[tf.Tensor]) -> list[list[int]]:
    """Returns `groups` in which few small tensors of one dtype share a buffer, aligned ones first.

    Among few, an aligned part of a buffer is a view, and any other a copy.
    """
    found, few = [], dict[tf.DType, list[int]]()
    for group in places:
        size = tensors[group[0]].shape.num_elements()
        if len(group) > 1 or size is None or size >= _LARGE:
            found.append(group)
        else:
            few.setdefault(tensors[group[0]].dtype, []).append(group[0])
    for dtype, group in few.items():
        sizes = {place: tensors[place].shape.num_elements() * dtype.size for place in group}
        group.sort(key=lambda place: sizes[place] % _ALIGNED > 0)
        found += [group] if len(group) >= _FEWEST_SHARED else [[place] for place in group]
    return found


def in_buffers(tensors: Sequence[tf.Tensor]) -> bool:
    """Returns whether each tensor was packed or unpacked, so that `shared` costs no copy."""
    return all(hasattr(tensor, _BUFFER) for tensor in tensors)


def _joined(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns a tensor that is alone, or a vector of several: the one that they have, if any."""
    if len(tensors) == 1:
        return tensors[0]
    if in_buffers(tensors):
        buffer = getattr(tensors[0], _BUFFER)[0]
        places = [(id(buffer), len(tensors), place) for place in range(len(tensors))]
        own = [getattr(tensor, _BUFFER) for tensor in tensors]
        if places == [(id(one), *rest) for one, *rest in own]:
            return buffer
    buffer = tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], axis=0)
    if not any(hasattr(tensor, _BUFFER) for tensor in tensors):
        _remember(buffer, tensors)
    return buffer


def _remember(buffer: tf.Tensor, tensors: Sequence[tf.Tensor]) -> None:
    """Notes with each tensor its place in a buffer of the same graph."""
    if tf.executing_eagerly() or any(tensor.graph is not buffer.graph for tensor in tensors):
        return
    for place, tensor in enumerate(tensors):
        setattr(tensor, _BUFFER, (buffer, len(tensors), place))


def norms(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the Euclidean norm of each tensor of one dtype, at least float32: [tensors].

    Each norm always adds in the same order, so all replicas get the same bits.
    """
    sizes = [tensor.shape.num_elements() for tensor in tensors]
    small = [place for place, size in enumerate(sizes) if size < _LARGE]
    if len(small) < FEWEST:
        return tf.stack([norm(tensor) for tensor in tensors])
    return tf.sqrt(_square_sums(tensors, sizes, small))


def norm(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the Euclidean norm of a tensor, []: the kernel that adds takes the root too."""
    if microbatch.is_compiled():  # XLA makes one kernel of these, and has no EuclideanNorm
        return tf.sqrt(tf.reduce_sum(tf.square(tensor)))
    return tf.raw_ops.EuclideanNorm(input=tf.reshape(tensor, [-1]), axis=[0])


def _square_sums(
    tensors: Sequence[tf.Tensor], sizes: Sequence[int], small: Sequence[int]
) -> tf.Tensor:
    """Returns the sum of squares of each of many tensors of one dtype: [tensors]."""
    large = [place for place, size in enumerate(sizes) if size >= _LARGE]
    sums = _small_square_sums([tensors[place] for place in small])
    if not large:
        return sums
    of_large = 2 * tf.stack([tf.nn.l2_loss(tensors[place]) for place in large])
    # Not int32, which TensorFlow keeps on the host.
    order = tf.constant(np.argsort([*small, *large]), tf.int64)
    return tf.gather(tf.concat([sums, of_large], axis=0), order)


def unstacked(vector: tf.Tensor) -> list[tf.Tensor]:
    """Returns the entries of a vector as scalars, with one kernel where there are many."""
    return [tf.reshape(entry, []) for entry in tf.split(vector, [1] * vector.shape[0])]


def _small_square_sums(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns `_square_sums`: of rows in one matrix, then of the rows of each tensor."""
    dtype, sizes = tensors[0].dtype, [tensor.shape.num_elements() for tensor in tensors]
    rows = [-(-size // _ROW) for size in sizes]
    parts: list[tf.Tensor] = []
    for tensor, size, count in zip(tensors, sizes, rows, strict=True):
        parts.append(tf.reshape(tensor, [-1]))
        if padding := count * _ROW - size:
            parts.append(tf.zeros([padding], dtype))
    parts.append(tf.zeros([_ROW], dtype))
    matrix = tf.reshape(tf.concat(parts, axis=0), [-1, _ROW])
    of_rows = tf.reduce_sum(tf.square(matrix), axis=1)
    # The rows of each tensor, filled up with the last row, which is empty.
    index = np.full([len(tensors), max(rows)], sum(rows))
    for place, (end, count) in enumerate(zip(np.cumsum(rows), rows, strict=True)):
        index[place, :count] = np.arange(end - count, end)
    return tf.reduce_sum(tf.gather(of_rows, tf.constant(index, tf.int64)), axis=1)
