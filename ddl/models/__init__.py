"""Plain Keras 3 models with input scaling inside, so that serving takes the same raw inputs."""

from ddl.models.convolutional import cnn, resnet
from ddl.models.generation import generate, load_exported
from ddl.models.perceptrons import mlp, table_mlp
from ddl.models.transformers import bert, gpt

__all__ = ["bert", "cnn", "generate", "gpt", "load_exported", "mlp", "resnet", "table_mlp"]
