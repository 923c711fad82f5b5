"""Rematerialization: parts of models that the backward pass computes again.

Activations of these parts are not kept from the forward pass to the backward pass, which takes less
memory and more time. Results do not change. Chen et al. 2016, "Training Deep Nets with Sublinear
Memory Cost".
"""

from ddl.step.remat.parts import Parts
from ddl.step.remat.rule import Remat

__all__ = ["Parts", "Remat"]
