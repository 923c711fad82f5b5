"""Few kernels on GPUs: many small tensors in one buffer.

A GPU takes a few microseconds to start a kernel, whether for a bias or for a million entries. An
operation on each of a model's hundreds of gradients is therefore made once, on a buffer that holds
all small ones. Large tensors stay alone: copying them into a buffer would take longer than it
saves. CPUs start an operation faster than they copy, so they work on each tensor.

An operation on each entry gives the same bits in a buffer. A sum over all entries adds in another
order.
"""

from collections.abc import Callable, Sequence

import tensorflow as tf

from ddl import microbatch

_LARGE = 2**20  # entries of a tensor that stays alone
_BUFFER = "_ddl_buffer"  # attribute of a symbolic tensor: its buffer, and its place there


class Packed:
    """Tensors in few buffers, for operations on each entry. In a graph.

    A buffer is found again: tensors that were packed or unpacked together are packed without a
    copy.

    Attributes:
      places: Places of the tensors of each buffer.
      buffers: A tensor that stays alone, or a vector of several tensors of one dtype.
    """

    def __init__(self, tensors: Sequence[tf.Tensor], shared: bool = False):
        """Packs tensors; those of unknown shape stay alone, and all in what XLA compiles.

        Args:
          tensors: The tensors.
          shared: Whether several operations follow, each on what the one before returned. Few
            tensors are then packed too, since the operations outweigh the copies.
        """
        self._tensors = list(tensors)
        groups: dict[tf.DType, list[int]] = {}
        for place, tensor in enumerate(tensors):
            if (tensor.shape.num_elements() or _LARGE) < _LARGE and not microbatch.is_compiled():
                groups.setdefault(tensor.dtype, []).append(place)
        together = [group for group in groups.values() if len(group) >= (3 if shared else 16)]
        packed = {place for group in together for place in group}
        self.places = [[n] for n in range(len(self._tensors)) if n not in packed] + together
        self.buffers = [_joined([self._tensors[n] for n in group]) for group in self.places]

    def each(self, function: Callable[[tf.Tensor], tf.Tensor]) -> list[tf.Tensor]:
        """Returns the tensors, in their order and shapes, after a function of each entry."""
        found: list[tf.Tensor] = list(self._tensors)
        for group, buffer in zip(self.places, map(function, self.buffers), strict=True):
            if len(group) == 1:
                found[group[0]] = buffer
                continue
            shapes = [self._tensors[place].shape for place in group]
            parts = tf.split(buffer, [shape.num_elements() for shape in shapes])
            parts = [tf.reshape(x, shape) for x, shape in zip(parts, shapes, strict=True)]
            _remember(buffer, parts)
            for place, part in zip(group, parts, strict=True):
                found[place] = part
        return found


def in_buffers(tensors: Sequence[tf.Tensor]) -> bool:
    """Returns whether each tensor was packed or unpacked, so that `shared` costs no copy."""
    return all(hasattr(tensor, _BUFFER) for tensor in tensors)


def norm(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the Euclidean norm of a tensor, []: the kernel that adds takes the root too."""
    if microbatch.is_compiled():  # XLA makes one kernel of these, and has no EuclideanNorm
        return tf.sqrt(tf.reduce_sum(tf.square(tensor)))
    return tf.raw_ops.EuclideanNorm(input=tf.reshape(tensor, [-1]), axis=[0])


def _joined(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns a tensor that is alone, or a vector of several: the one that they have, if any."""
    if len(tensors) == 1:
        return tensors[0]
    if in_buffers(tensors):
        (buffer, _, _) = getattr(tensors[0], _BUFFER)
        places = [(id(buffer), place, len(tensors)) for place in range(len(tensors))]
        if places == [(id(x), *rest) for x, *rest in (getattr(t, _BUFFER) for t in tensors)]:
            return buffer
    buffer = tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], axis=0)
    _remember(buffer, [tensor for tensor in tensors if tensor.graph is buffer.graph])
    return buffer


def _remember(buffer: tf.Tensor, tensors: Sequence[tf.Tensor]) -> None:
    for place, tensor in enumerate(tensors):
        setattr(tensor, _BUFFER, (buffer, place, len(tensors)))
