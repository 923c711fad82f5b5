"""Custom training loops on tf.distribute that compute the same result on any devices.

The public names below are imported on first use, so that ``import ddl`` (and with it
``python -m ddl.main --help``) does not wait for TensorFlow.
"""

import importlib.util
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:  # for completion and types, which cannot follow `__getattr__`
    from ddl import config as config
    from ddl import data as data
    from ddl import distribution as distribution
    from ddl import errors as errors
    from ddl import layers as layers
    from ddl import metrics as metrics
    from ddl import models as models
    from ddl import optimizers as optimizers
    from ddl import precision as precision
    from ddl import random as random
    from ddl import tasks as tasks
    from ddl.checkpoints.checkpoints import Checkpoints as Checkpoints
    from ddl.checkpoints.directory import Retention as Retention
    from ddl.checkpoints.warm_start import WarmStart as WarmStart
    from ddl.optimizers.loss_weight import LossWeight as LossWeight
    from ddl.optimizers.weight_average import ExponentialMovingAverage as ExponentialMovingAverage
    from ddl.precision import LossScale as LossScale
    from ddl.run.callbacks import AfterEvaluation as AfterEvaluation
    from ddl.run.callbacks import AfterSave as AfterSave
    from ddl.run.callbacks import EarlyStopping as EarlyStopping
    from ddl.run.callbacks import Every as Every
    from ddl.run.fit import fit as fit
    from ddl.run.from_checkpoints import evaluate as evaluate
    from ddl.run.from_checkpoints import export as export
    from ddl.run.from_checkpoints import load as load
    from ddl.run.predicting import predict as predict
    from ddl.run.range_test import find_learning_rate as find_learning_rate
    from ddl.step.gradients import Gradients as Gradients
    from ddl.step.state import StepBatch as StepBatch
    from ddl.step.update import Update as Update
    from ddl.tasks.classification import Classification as Classification
    from ddl.tasks.classification import MultiLabel as MultiLabel
    from ddl.tasks.classification import Segmentation as Segmentation
    from ddl.tasks.gather import current_batch as current_batch
    from ddl.tasks.gather import gather as gather
    from ddl.tasks.language import LanguageModel as LanguageModel
    from ddl.tasks.language import MaskedLanguageModel as MaskedLanguageModel
    from ddl.tasks.supervised import Regression as Regression
    from ddl.tasks.supervised import Supervised as Supervised
    from ddl.tasks.task import PerExample as PerExample
    from ddl.tasks.task import Task as Task
    from ddl.training.trainer import Trainer as Trainer

_NAMES = {
    "checkpoints.checkpoints": "Checkpoints",
    "checkpoints.directory": "Retention",
    "checkpoints.warm_start": "WarmStart",
    "optimizers.loss_weight": "LossWeight",
    "optimizers.weight_average": "ExponentialMovingAverage",
    "precision": "LossScale",
    "run.callbacks": "AfterEvaluation AfterSave EarlyStopping Every",
    "run.fit": "fit",
    "run.from_checkpoints": "evaluate export load",
    "run.predicting": "predict",
    "run.range_test": "find_learning_rate",
    "step.gradients": "Gradients",
    "step.state": "StepBatch",
    "step.update": "Update",
    "tasks.classification": "Classification MultiLabel Segmentation",
    "tasks.gather": "current_batch gather",
    "tasks.language": "LanguageModel MaskedLanguageModel",
    "tasks.supervised": "Regression Supervised",
    "tasks.task": "PerExample Task",
    "training.trainer": "Trainer",
}
_HOME = {name: f"ddl.{home}" for home, names in _NAMES.items() for name in names.split()}

# Modules that `dir` shows; others can be had as well, such as `ddl.check`.
_MODULES = "config data distribution errors layers metrics models optimizers precision random tasks"

__all__ = [*_HOME, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if importlib.util.find_spec(f"ddl.{name}") is None:
        raise AttributeError(f"module 'ddl' has no attribute {name!r}")
    return importlib.import_module(f"ddl.{name}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES.split()])
