"""Tasks: a model, its per-example loss and its metrics."""

from ddl.tasks.classification import Classification, MultiLabel, Segmentation
from ddl.tasks.language import LanguageModel, MaskedLanguageModel
from ddl.tasks.supervised import Regression, Supervised

__all__ = ["Classification", "LanguageModel", "MaskedLanguageModel", "MultiLabel", "Regression"]
__all__ += ["Segmentation", "Supervised"]
