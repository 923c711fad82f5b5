"""Metrics that are no means: of Keras, functions of a mean, and of all outputs at once."""

from ddl.metrics.confusion_counts import ConfusionCounts
from ddl.metrics.keras_metric import KerasMetric
from ddl.metrics.mean_by_class import MeanByClass
from ddl.metrics.of_all_outputs import OfAllOutputs
from ddl.metrics.of_mean import FunctionOfMean, Perplexity

__all__ = [
    "ConfusionCounts",
    "FunctionOfMean",
    "KerasMetric",
    "MeanByClass",
    "OfAllOutputs",
    "Perplexity",
]
