"""Keras metrics that take probabilities, and silently compute something else from logits."""

import keras

_SWEEPING = (
    *(keras.metrics.SensitivityAtSpecificity, keras.metrics.SpecificityAtSensitivity),
    *(keras.metrics.PrecisionAtRecall, keras.metrics.RecallAtPrecision),
)
_COUNTING = (
    *(keras.metrics.Precision, keras.metrics.Recall),
    *(keras.metrics.TruePositives, keras.metrics.TrueNegatives),
    *(keras.metrics.FalsePositives, keras.metrics.FalseNegatives),
)


def takes_probabilities(metric: keras.metrics.Metric) -> bool:
    """Returns whether Keras clips the outputs to [0, 1], or compares them with 0.5 by default."""
    if isinstance(metric, keras.metrics.AUC):
        return not metric._from_logits
    if isinstance(metric, _COUNTING):
        return metric.init_thresholds is None and getattr(metric, "top_k", None) is None
    return isinstance(metric, _SWEEPING)


def remedy(metric: keras.metrics.Metric) -> str:
    """Returns what to do if the outputs are no probabilities."""
    instead = "Pass tf.sigmoid or tf.nn.softmax of the logits"
    if isinstance(metric, keras.metrics.AUC):
        return f"{instead}, or set from_logits=True."
    return f"{instead}, or set thresholds=0." if isinstance(metric, _COUNTING) else f"{instead}."
