"""Plain Keras 3 models. Each begins by scaling raw inputs, so that it is served as trained."""

from ddl.models.cnn import cnn
from ddl.models.mlp import mlp

__all__ = ["cnn", "mlp"]
