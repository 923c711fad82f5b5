"""Gradients of which each replica holds its share alone."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class InShares:
    """Reduced gradients in shares; only an optimizer's update can use them.

    Attributes:
      values: For each variable, a vector [entries of a share] on each replica.
    """

    values: list[Any]
