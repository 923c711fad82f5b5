"""Makes ddl compute on CPUs with few kernels, as it does on GPUs."""

import dataclasses

import pytest

from ddl.distribution import path
from ddl.step import packing

FEW_KERNELS = dataclasses.replace(path.CPU, packs_tensors=True)


def as_on_gpus(patch: pytest.MonkeyPatch) -> None:
    """With buffers of few, small tensors, so that small models have some and large tensors too."""
    patch.setattr(path, "_taken", [FEW_KERNELS])
    patch.setattr(packing, "FEWEST", 2)
    patch.setattr(packing, "_LARGE", 600)
    patch.setattr(packing, "_ROW", 8)
