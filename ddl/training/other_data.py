"""Pipelines of other data than those of training, such as of an evaluation."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from ddl.data.checks import check_same_classes, check_same_features
from ddl.data.conversion import as_source
from ddl.data.pipeline import BatchPipeline
from ddl.tasks.task import Task


def in_order(
    task: Any, data: Any, argument: str, train: Mapping[str, BatchPipeline], resident: Any = False
) -> BatchPipeline:
    """Returns the pipeline of other data, in their order, with batches of the first source's size.

    Args:
      task: The task. Inputs alone, and x of (x, y), get the name of its input.
      data: As `ddl.Trainer` takes it, or one array of inputs.
      argument: Name of the argument that the data are, for errors.
      train: The pipelines of the training data.
      resident: As `BatchPipeline` takes it.

    Raises:
      DataError: If the data are of another kind.
    """
    is_known = "" in train and "input" in train[""].element_spec  # x of (x, y)
    name = getattr(task, "input_name", "input" if is_known else None)
    x, *others = data if isinstance(data, tuple) and len(data) in (2, 3) else [data]
    is_array = isinstance(x, np.ndarray) or tf.is_tensor(x)
    if isinstance(name, str) and (is_array or others) and not isinstance(x, Mapping):
        data = ({name: x}, *others) if others else {name: x}
    first, source = next(iter(train.values())), as_source(data, argument)
    size = first.global_batch_size
    return BatchPipeline(source, size, seed=first.seed, shuffle=False, resident=resident)


def evaluation_pipeline(
    task: Task, data: Any, argument: str, train: Mapping[str, BatchPipeline], resident: Any = False
) -> BatchPipeline:
    """Returns the pipeline of evaluation data, which have the form of the training data.

    Args:
      task: The task, whose `check` the data must pass.
      data: As `in_order` takes it, and the further arguments.
      argument: See there.
      train: See there.
      resident: See there.

    Raises:
      DataError: If the data are of another kind, or do not fit.
    """
    pipeline = in_order(task, data, argument, train, resident)
    if hasattr(task, "check"):
        task.check(pipeline.source)
    if "" in train:
        check_same_features(train[""].element_spec, pipeline.element_spec)
        check_same_classes(train[""].source, pipeline.source)
    return pipeline
