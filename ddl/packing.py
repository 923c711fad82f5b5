"""Few kernels on GPUs: many small tensors in one buffer.

A GPU takes a few microseconds to start a kernel, whether for a bias or for a million entries. An
operation on each of a model's hundreds of variables is therefore made once, on a buffer that holds
all small ones. Large tensors stay alone: copying them into a buffer would take longer than it
saves. CPUs start an operation faster than they copy, so they work on each tensor.

An operation on each entry gives the same bits in a buffer. A sum over all entries adds in another
order.
"""

from collections.abc import Callable, Iterable, Sequence

import tensorflow as tf

FEWEST = 16
"""Fewest tensors of a buffer. TensorFlow joins and splits fewer of them one by one."""

_LARGE = 2**20  # entries of a tensor that stays alone
_LARGEST_BUFFER = 2**24  # entries; buffers take additional memory
_ALIGNED = 64  # bytes: parts of a buffer that begin at a multiple are shared, not copied


def on_gpus(devices: Iterable[str]) -> bool:
    """Returns whether all devices, given by name, are GPUs; False for none."""
    names = [device.upper() for device in devices]
    return bool(names) and all("GPU" in name for name in names)


class Packed:
    """Tensors in few buffers, for operations on each entry.

    Attributes:
      buffers: A tensor that stays alone, or a vector of several tensors of one dtype.
    """

    def __init__(self, tensors: Sequence[tf.Tensor]):
        """Packs tensors; those of unknown shape stay alone."""
        self._tensors = list(tensors)
        self._groups = groups(self._tensors)
        self.buffers = self.alike(self._tensors)

    def alike(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Packs other tensors of the same shapes and of one dtype in the same way."""
        return [
            tensors[group[0]]
            if len(group) == 1
            else tf.concat([tf.reshape(tensors[place], [-1]) for place in group], axis=0)
            for group in self._groups
        ]

    def unpacked(self, buffers: Sequence[tf.Tensor], to_keep: bool = False) -> list[tf.Tensor]:
        """Returns the tensors that lie in buffers, in their own order and shapes.

        Args:
          buffers: One for each of `self.buffers`, of its shape.
          to_keep: Whether variables will hold the tensors. They are then copied here, at once; else
            a variable would copy its part of the buffer itself.
        """
        found: list[tf.Tensor] = list(self._tensors)
        for group, buffer in zip(self._groups, buffers, strict=True):
            if len(group) == 1:
                found[group[0]] = buffer
                continue
            shapes = [self._tensors[place].shape for place in group]
            sizes = [shape.num_elements() for shape in shapes]
            parts = tf.split(buffer[tf.newaxis], sizes, 1) if to_keep else tf.split(buffer, sizes)
            for place, part, shape in zip(group, parts, shapes, strict=True):
                found[place] = tf.reshape(part, shape)
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
