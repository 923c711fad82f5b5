"""The confusion matrix of several classes."""

from typing import Any

import keras


class ConfusionCounts(keras.metrics.MeanIoU):
    """A Keras metric: Σ weight for each label and predicted class, [num_classes, num_classes].

    Use it in `ddl.metrics.KerasMetric`. The figure "NAME/2/0" counts the examples of class 2 that
    the model takes for class 0. Labels and outputs are class numbers; with sparse_y_pred=False the
    outputs hold a score for each class, of which the largest counts.
    """

    def __init__(
        self,
        num_classes: int,
        name: str = "confusion_matrix",
        dtype: Any = None,
        ignore_class: int | None = None,
        sparse_y_true: bool = True,
        sparse_y_pred: bool = True,
        axis: int = -1,
    ):
        """Takes the arguments of `keras.metrics.MeanIoU`."""
        super().__init__(num_classes, name, dtype, ignore_class, sparse_y_true, sparse_y_pred, axis)

    def result(self) -> Any:
        """Returns the matrix."""
        return keras.ops.convert_to_tensor(self.total_cm)
