"""The recorded values of some updates. Imports no TensorFlow."""

import dataclasses

import numpy as np

from ddl.checking.recording import Recording


@dataclasses.dataclass
class Recorded:
    """The values of some updates, as `Replayer.record` writes them to a file.

    Attributes:
      recording: The values; an update has the number of its step. The variables before the first
        update have the number of the step before.
      indices: For each step, the indices and weights of the rows by the name of the source; None
        for a source that reads in an order of its own.
      digests: For each step, the digests of all that a checkpoint after it holds, by path
        (`ddl.replay.digests.State`).
    """

    recording: Recording
    indices: dict[int, dict[str, dict[str, np.ndarray] | None]]
    digests: dict[int, dict[str, str]] = dataclasses.field(default_factory=dict)
