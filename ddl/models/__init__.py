"""Plain Keras 3 models with input scaling inside, so that serving takes the same raw inputs."""

from ddl.models.convolutional import cnn
from ddl.models.perceptron import mlp
from ddl.models.residual import resnet

__all__ = ["cnn", "mlp", "resnet"]
