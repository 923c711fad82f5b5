"""Large-batch optimizers with layer-wise learning rates: LARS and LAMB."""

from ddl.optimizers.layerwise.lamb import LAMB
from ddl.optimizers.layerwise.lars import LARS

__all__ = ["LAMB", "LARS"]
