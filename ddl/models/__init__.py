"""Plain Keras 3 models with input scaling inside, so that serving takes the same raw inputs."""

from ddl.models.applications import keras_application
from ddl.models.bidirectional import bert
from ddl.models.convolutional import cnn
from ddl.models.exported import load_exported
from ddl.models.generation import generate
from ddl.models.hub import keras_hub_model
from ddl.models.perceptron import mlp
from ddl.models.residual import resnet
from ddl.models.segmentation import unet
from ddl.models.tabular import table_mlp
from ddl.models.transformers import gpt, vit

__all__ = [
    "bert",
    "cnn",
    "generate",
    "gpt",
    "keras_application",
    "keras_hub_model",
    "load_exported",
    "mlp",
    "resnet",
    "table_mlp",
    "unet",
    "vit",
]
