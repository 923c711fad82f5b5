"""Metrics that are no means: of Keras, functions of a mean, and of all outputs at once."""

from ddl.metrics.keras_metric import KerasMetric
from ddl.metrics.means import FunctionOfMean, MeanByClass, Perplexity, WeightedMean
from ddl.metrics.of_all_outputs import OfAllOutputs

__all__ = ["FunctionOfMean", "KerasMetric", "MeanByClass", "OfAllOutputs", "Perplexity"]
__all__ += ["WeightedMean"]
