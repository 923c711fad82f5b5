"""Tasks: a model, its per-example loss and its metrics."""

from ddl.tasks.classification import Classification
from ddl.tasks.supervised import Supervised

__all__ = ["Classification", "Supervised"]
