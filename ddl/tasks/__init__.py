"""Tasks: a model, its per-example loss and its metrics."""

from ddl.tasks.classification import Classification

__all__ = ["Classification"]
