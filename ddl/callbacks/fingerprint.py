"""What of a training a callback may change, as a checksum."""

import zlib

import numpy as np

from ddl.data import ReplayBuffer
from ddl.tasks.parts import copies_of, layers_of, own_variables_of, variables_of
from ddl.training.trainer import Trainer


def fingerprint(trainer: Trainer, holder: object) -> list[float]:
    """Returns checksums of the task's own variables, learning rates and replay buffers.

    The weights are left out: to read them all takes too long. Eager, on one worker alone.

    Args:
      trainer: The trainer.
      holder: The object of the callback, whose variables count too; None for none.
    """
    variables = own_variables_of(trainer.task, layers_of(trainer.task))
    variables += variables_of([holder])
    own = [_checksum(copies_of(variable)[0].numpy()) for variable in variables]
    sources = [pipeline.source for pipeline in trainer.pipelines.values()]
    buffers = [one.digest for one in sources if isinstance(one, ReplayBuffer)]
    return [*own, *trainer.learning_rates.values(), *buffers]


def _checksum(array: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(array).tobytes())
