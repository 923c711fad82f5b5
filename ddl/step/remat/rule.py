"""The rule that selects the layers to recompute."""

import dataclasses
import fnmatch
from collections.abc import Sequence

from ddl.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Remat:
    """Selects the parts of the task's models that the backward pass computes again.

    A part keeps only its inputs for the backward pass, which computes the part again before its
    gradients. This changes memory and time, not results.

    In functional and sequential models, the layers between two points that a single tensor passes
    are one part, such as a residual block, or a layer of a plain chain. Elsewhere each layer that
    matches is a part. A layer within a layer that matches belongs to the part of the outer one.

    Attributes:
      layers: Patterns of names of layers, such as "block_*", of which one must match; with a slash,
        patterns of the end of a path, such as "encoder/block_*". Layers that different patterns
        match are different parts. Embeddings are never recomputed.
      together: Number of consecutive parts that are recomputed as one and keep only the inputs of
        the first. For chains of n layers of one size, √n takes the least memory.
      every: Recomputes the first of each `every` parts and keeps the activations of the others.

    Raises:
      ConfigError: If a number is below 1 or there is no pattern.
    """

    layers: str | Sequence[str] = "*"
    together: int = 1
    every: int = 1

    def __post_init__(self) -> None:
        patterns = self.patterns
        if not patterns or not all(isinstance(one, str) and one for one in patterns):
            raise ConfigError(
                "Remat.layers must be a pattern of names of layers, or a list of patterns, got "
                f"{self.layers!r:.80}. Pass one, such as 'block_*'."
            )
        for name in ("together", "every"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"Remat.{name} must be an integer of at least 1, got {value!r}.")

    @property
    def patterns(self) -> tuple[str, ...]:
        """The patterns of `layers`."""
        return (self.layers,) if isinstance(self.layers, str) else tuple(self.layers)

    def matching(self, path: str) -> list[int]:
        """Returns the numbers of the patterns that match a layer.

        Args:
          path: Names of the layer and of the layers around it, outermost first, with slashes.
        """
        name = path.rpartition("/")[2]
        return [
            number
            for number, pattern in enumerate(self.patterns)
            if fnmatch.fnmatchcase(name, pattern)
            or ("/" in pattern and fnmatch.fnmatchcase(f"/{path}", f"*/{pattern}"))
        ]
