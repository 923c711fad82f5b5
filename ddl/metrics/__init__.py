"""Metrics that are no means: of Keras, functions of a mean, and of all outputs at once."""

from ddl.metrics.confusion_matrix import ConfusionMatrix
from ddl.metrics.keras_metric import KerasMetric
from ddl.metrics.of_all_outputs import OfAllOutputs
from ddl.metrics.of_mean import FunctionOfMean, Perplexity

__all__ = ["ConfusionMatrix", "FunctionOfMean", "KerasMetric", "OfAllOutputs", "Perplexity"]
