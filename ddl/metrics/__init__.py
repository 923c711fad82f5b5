"""Metrics that are no means: of Keras, functions of a mean, and of all outputs at once."""

from ddl.metrics.keras_metric import KerasMetric
from ddl.metrics.means import FunctionOfMean, Perplexity, WeightedMean
from ddl.metrics.of_all_outputs import OfAllOutputs

__all__ = ["FunctionOfMean", "KerasMetric", "OfAllOutputs", "Perplexity"]
__all__ += ["WeightedMean"]
