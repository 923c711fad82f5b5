"""Cases of benchmarks.gpu. Imports no TensorFlow."""

import dataclasses

PRECISIONS = ("float32", "tf32", "mixed_float16", "mixed_bfloat16")


@dataclasses.dataclass(frozen=True)
class Case:
    """A network and a format.

    Attributes:
      network: Name of the network.
      batch: Examples of an update.
      steps: Updates in a window.
      examples: Examples of the data.
      tokens: Tokens of an example; 1 for images.
      precision: One of `PRECISIONS`.
      rounds: Windows of each contender in a process.
    """

    network: str
    batch: int
    steps: int
    examples: int
    tokens: int = 1
    precision: str = "float32"
    rounds: int = 5

    def __post_init__(self) -> None:
        """Checks that a window is at most an epoch: Keras's fit ends a window with its arrays."""
        if self.batch * self.steps > self.examples:
            raise ValueError(
                f"{self}: {self.steps} batches need more than {self.examples} examples"
            )

    def __str__(self) -> str:
        return f"{self.network} {self.batch}, {self.precision}"


_NETWORKS = (
    Case("MLP", 64, 1000, 64_000),
    Case("wide MLP", 1000, 50, 50_000),
    Case("CNN", 512, 100, 51_200),
    Case("CNN", 2048, 25, 51_200),
    Case("ResNet-50", 256, 10, 2_560, rounds=3),
    Case("GPT", 32, 20, 640, tokens=512, rounds=3),
)
CASES = tuple(
    dataclasses.replace(case, precision=precision) for case in _NETWORKS for precision in PRECISIONS
)
