"""Plain Keras 3 models. Each begins by scaling raw inputs, so that it is served as trained."""

from ddl.models.convolutional import cnn
from ddl.models.perceptron import mlp
from ddl.models.residual import resnet

__all__ = ["cnn", "mlp", "resnet"]
