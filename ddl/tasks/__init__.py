"""Tasks: a model, its per-example loss and its metrics."""

from ddl.tasks.classification import Classification
from ddl.tasks.distillation import Distillation
from ddl.tasks.language import LanguageModel, MaskedLanguageModel
from ddl.tasks.multi_label import MultiLabel
from ddl.tasks.regression import Regression
from ddl.tasks.segmentation import Segmentation
from ddl.tasks.supervised import Supervised

__all__ = [
    "Classification",
    "Distillation",
    "LanguageModel",
    "MaskedLanguageModel",
    "MultiLabel",
    "Regression",
    "Segmentation",
    "Supervised",
]
