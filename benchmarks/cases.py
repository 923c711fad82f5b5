"""The trainings that contenders are measured on. Imports no backend of Keras."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Case:
    """A training.

    Attributes:
      network: Name of a network, and the first word of the case's name.
      batch: Global batch size.
      steps: Updates in a window of a contender that calls something for each update.
      longer: Factor on `steps` for windows of one tf.while, so that the cost of its call weighs
        as little as in a long training.
      replicas: 1 for one device; more are mirrored on as many virtual CPUs.
      examples: Number of examples; at least two windows of `steps`.
      rows: Rows of the table of embeddings.
      workers: Processes of a cluster, which TF_CONFIG describes.
      precision: Number format, or "tf32".
      gpu: Whether to take the first GPU.
    """

    network: str
    batch: int
    steps: int
    longer: int = 1
    replicas: int = 1
    examples: int = 57_600
    rows: int = 0
    workers: int = 1
    precision: str = "float32"
    gpu: bool = False

    @property
    def updates(self) -> int:
        """Updates in a window of one tf.while."""
        return self.steps * self.longer

    def __str__(self) -> str:
        where = "one device" if self.replicas == 1 else f"mirrored on {self.replicas}"
        where = self.precision if self.gpu else where
        return f"{self.rows:,} rows" if self.rows else f"{self.network} {self.batch}, {where}"
