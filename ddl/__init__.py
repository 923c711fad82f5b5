"""ddl: custom training loops on tf.distribute that compute the same thing on any devices.

The public names below are imported on first use, so that ``import ddl`` (and with it
``python -m ddl.main --help``) does not wait for TensorFlow.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from ddl.checkpoints import Checkpoints
    from ddl.noise_scale import GradientNoiseScale
    from ddl.precision import LossScale
    from ddl.retention import Retention
    from ddl.task import PerExample, Task
    from ddl.tasks.classification import Classification
    from ddl.trainer import Trainer
    from ddl.warm_start import WarmStart
    from ddl.weight_average import ExponentialMovingAverage

_HOME = {
    "Checkpoints": "ddl.checkpoints",
    "Classification": "ddl.tasks.classification",
    "ExponentialMovingAverage": "ddl.weight_average",
    "GradientNoiseScale": "ddl.noise_scale",
    "LossScale": "ddl.precision",
    "PerExample": "ddl.task",
    "Retention": "ddl.retention",
    "Task": "ddl.task",
    "Trainer": "ddl.trainer",
    "WarmStart": "ddl.warm_start",
}

_SUBMODULES = (
    *("data", "distribution", "layers", "models", "optimizers", "precision", "random", "tasks"),
)

__all__ = [
    "Checkpoints",
    "Classification",
    "ExponentialMovingAverage",
    "GradientNoiseScale",
    "LossScale",
    "PerExample",
    "Retention",
    "Task",
    "Trainer",
    "WarmStart",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if name in _SUBMODULES:
        return importlib.import_module(f"ddl.{name}")
    raise AttributeError(f"module 'ddl' has no attribute {name!r}")
