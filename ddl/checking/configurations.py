"""The configurations that a check compares. Imports no TensorFlow."""

from typing import NamedTuple


class Configuration(NamedTuple):
    """The numbers of replicas and microbatches of a run.

    Attributes:
      replicas: Number of virtual CPU devices.
      microbatches: Microbatches per replica and update.
      resumed: Whether the run restores the checkpoint of `WRITER` and makes only the last update.
    """

    replicas: int
    microbatches: int
    resumed: bool = False

    def __str__(self) -> str:
        replicas = f"{self.replicas} replica{'s' if self.replicas > 1 else ''}"
        microbatches = f"{self.microbatches} microbatch{'es' if self.microbatches > 1 else ''}"
        return f"{replicas} × {microbatches}{', resumed' if self.resumed else ''}"

    @property
    def parts(self) -> int:
        """Number of parts of a global batch."""
        return self.replicas * self.microbatches

    @property
    def file(self) -> str:
        """Name of the file of its recording."""
        return f"{self.replicas}x{self.microbatches}{'-resumed' if self.resumed else ''}.pickle"


ONE = Configuration(1, 1)
"""One device that computes the global batch at once."""

WRITER = Configuration(2, 1)
"""The configuration that saves a checkpoint before its last update."""

RESUMED = WRITER._replace(resumed=True)
"""A fresh process that restores this checkpoint."""

ALL = (
    ONE,
    Configuration(1, 2),
    WRITER,
    Configuration(2, 2),
    Configuration(4, 1),
    Configuration(4, 2),
    RESUMED,
)
"""In the order of a report."""

UPDATES = 3
"""Updates of each run; the batch of the last one has padding."""
