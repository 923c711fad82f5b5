"""Metrics that are no means: of Keras, functions of a mean, and of all outputs at once."""

from ddl.metrics.corpus_metric import CorpusMetric
from ddl.metrics.keras_metric import KerasMetric
from ddl.metrics.means import FunctionOfMean, Perplexity, WeightedMean

__all__ = ["CorpusMetric", "FunctionOfMean", "KerasMetric", "Perplexity", "WeightedMean"]
