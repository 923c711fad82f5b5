"""Custom training loops on tf.distribute that compute the same result on any devices.

The public names below are imported on first use, so that ``import ddl`` (and with it
``python -m ddl.main --help``) does not wait for TensorFlow.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:  # for completion and types, which cannot follow `__getattr__`
    from ddl import callbacks as callbacks
    from ddl import checking as checking
    from ddl import checkpoints as checkpoints
    from ddl import config as config
    from ddl import data as data
    from ddl import distribution as distribution
    from ddl import errors as errors
    from ddl import layers as layers
    from ddl import metrics as metrics
    from ddl import microbatch as microbatch
    from ddl import models as models
    from ddl import optimizers as optimizers
    from ddl import precision as precision
    from ddl import random as random
    from ddl import run as run
    from ddl import step as step
    from ddl import tasks as tasks
    from ddl import training as training
    from ddl.callbacks.early_stopping import EarlyStopping
    from ddl.checkpoints.checkpoints import Checkpoints
    from ddl.checkpoints.retention import Retention
    from ddl.checkpoints.warm_start import WarmStart
    from ddl.optimizers.loss_weight import LossWeight
    from ddl.precision import LossScale
    from ddl.run.fit import fit
    from ddl.run.range_test import find_learning_rate
    from ddl.step.remat import Remat
    from ddl.step.verbs.batches import StepBatch
    from ddl.step.verbs.gradients import Gradients
    from ddl.step.verbs.update import Update
    from ddl.step.weight_average import ExponentialMovingAverage
    from ddl.tasks.classification import Classification
    from ddl.tasks.current_batch import current_batch
    from ddl.tasks.distillation import Distillation
    from ddl.tasks.gather import gather
    from ddl.tasks.language import LanguageModel, MaskedLanguageModel
    from ddl.tasks.multi_label import MultiLabel
    from ddl.tasks.regression import Regression
    from ddl.tasks.segmentation import Segmentation
    from ddl.tasks.supervised import Supervised
    from ddl.tasks.task import PerExample, Task
    from ddl.training.trainer import Trainer

_HOME = {
    "Checkpoints": "ddl.checkpoints.checkpoints",
    "Classification": "ddl.tasks.classification",
    "Distillation": "ddl.tasks.distillation",
    "EarlyStopping": "ddl.callbacks.early_stopping",
    "ExponentialMovingAverage": "ddl.step.weight_average",
    "Gradients": "ddl.step.verbs.gradients",
    "LanguageModel": "ddl.tasks.language",
    "LossScale": "ddl.precision",
    "LossWeight": "ddl.optimizers.loss_weight",
    "MaskedLanguageModel": "ddl.tasks.language",
    "MultiLabel": "ddl.tasks.multi_label",
    "PerExample": "ddl.tasks.task",
    "Regression": "ddl.tasks.regression",
    "Remat": "ddl.step.remat",
    "Retention": "ddl.checkpoints.retention",
    "Segmentation": "ddl.tasks.segmentation",
    "StepBatch": "ddl.step.verbs.batches",
    "Supervised": "ddl.tasks.supervised",
    "Task": "ddl.tasks.task",
    "Trainer": "ddl.training.trainer",
    "Update": "ddl.step.verbs.update",
    "WarmStart": "ddl.checkpoints.warm_start",
    "current_batch": "ddl.tasks.current_batch",
    "find_learning_rate": "ddl.run.range_test",
    "fit": "ddl.run.fit",
    "gather": "ddl.tasks.gather",
}

_SUBMODULES = (
    *("callbacks", "checking", "checkpoints", "config", "data", "distribution", "errors", "layers"),
    *("metrics", "microbatch", "models", "optimizers", "precision", "random", "run", "step"),
    *("tasks", "training"),
)

__all__ = [
    "Checkpoints",
    "Classification",
    "Distillation",
    "EarlyStopping",
    "ExponentialMovingAverage",
    "Gradients",
    "LanguageModel",
    "LossScale",
    "LossWeight",
    "MaskedLanguageModel",
    "MultiLabel",
    "PerExample",
    "Regression",
    "Remat",
    "Retention",
    "Segmentation",
    "StepBatch",
    "Supervised",
    "Task",
    "Trainer",
    "Update",
    "WarmStart",
    "__version__",
    "current_batch",
    "find_learning_rate",
    "fit",
    "gather",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if name in _SUBMODULES:
        return importlib.import_module(f"ddl.{name}")
    raise AttributeError(f"module 'ddl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_SUBMODULES])
