"""Keras metrics that silently compute something else from outputs of another kind."""

import keras
import tensorflow as tf

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


def input_fault(metric: keras.metrics.Metric, outputs: tf.DType) -> str | None:
    """Returns why a metric does not take outputs of a dtype, or None; a clause for an error.

    Keras would truncate a probability of 0.9 to class 0.
    """
    takes_classes = isinstance(metric, keras.metrics.IoU) and metric.sparse_y_pred
    if takes_classes and outputs.is_floating and not isinstance(metric, keras.metrics.BinaryIoU):
        return (
            f"it takes class numbers as outputs, got {outputs.name}. Pass tf.argmax of the "
            "outputs, or set sparse_y_pred=False"
        )
    return None
