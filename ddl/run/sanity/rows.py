"""Data of the sanity modes: a few examples in memory, in place of those of the config."""

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from ddl import config
from ddl.choices import SanityMode
from ddl.data import IndexedSource, as_source
from ddl.data.conversion import sources_by_name
from ddl.data.pipeline import BatchPipeline
from ddl.data.pipeline.first_examples import first_examples
from ddl.data.source import Source
from ddl.seeds import hashed
from ddl.training.checks.batch_size import sizes_by_source

EVALUATION_BATCHES = 2
"""Batches of evaluation data that --fast_run reads."""


class Rows(IndexedSource):
    """Examples in memory, which repeat up to a length.

    Attributes:
      classes: Names of the classes, if the source of the examples has them.
    """

    def __init__(self, features: Mapping[str, tf.Tensor], length: int, like: Source):
        """Keeps the features.

        Args:
          features: Tensors [rows, …] by name.
          length: Number of examples; example i is row i modulo the number of rows.
          like: The source of the examples.
        """
        self._features = {name: features[name] for name in like.element_spec}
        self._length = length
        self._rows = len(next(iter(self._features.values())))
        self._spec = dict(like.element_spec)
        self.classes = getattr(like, "classes", None)

    def __len__(self) -> int:
        return self._length

    @property
    def element_spec(self) -> dict[str, tf.TensorSpec]:
        """See `Source`."""
        return self._spec

    @tf.autograph.experimental.do_not_convert
    def gather(self, indices: tf.Tensor) -> dict[str, tf.Tensor]:
        """See `IndexedSource`."""
        return {name: tf.gather(v, indices % self._rows) for name, v in self._features.items()}


def replace_data(mode: SanityMode, strategy: tf.distribute.Strategy) -> dict[str, Any]:
    """Replaces the data that the loaded config binds for the Trainer. Eager, in the scope.

    With `overfit_batch`, each batch of training data is the first one of the run, and the
    evaluation data are its rows. An epoch has as many batches as before, so that schedules stay as
    they are. With `fast_run`, the evaluation data are cut to two batches; a run of two updates
    reads no more training data anyway.

    Args:
      mode: The mode.
      strategy: The strategy.

    Returns:
      Arguments of the Trainer, which the config does not bind.

    Raises:
      ConfigError: If a run makes the training data itself.
    """
    sizes = config.build_bound("Trainer", "global_batch_size")
    data = config.build_bound("Trainer", "train_data")
    if data is None or sizes is None:
        return {}  # the Trainer reports the missing argument
    sources = sources_by_name(data)
    sizes = sizes_by_source(sizes, list(sources))
    evaluation = config.build_bound("Trainer", "eval_data")
    if mode == "fast_run":
        if evaluation is not None:
            source, size = as_source(evaluation), next(iter(sizes.values()))
            count = min(EVALUATION_BATCHES * size, source.examples_per_epoch(size))
            rows = _first(source, size, count, strategy, seed=0, shuffle=False)
            config.replace_built("Trainer", "eval_data", Rows(rows, count, source))
        return {}
    seed = config.build_bound("Trainer", "seed") or 0
    shuffle = config.build_bound("Trainer", "shuffle") is not False
    first, only = {}, {}
    for name, source in sources.items():
        size = sizes[name]
        of_source = hashed(seed, name) if name else seed  # as `ddl.training.assembly` does
        rows = _first(source, size, size, strategy, seed=of_source, shuffle=shuffle)
        first[name] = Rows(rows, source.steps_per_epoch(size) * size, source)
        only[name] = Rows(rows, size, source)
    config.replace_built("Trainer", "train_data", first.get("", first))
    if evaluation is not None and "" in only:
        config.replace_built("Trainer", "eval_data", only[""])
    if config.replace_built("Trainer", "shuffle", False):
        return {}
    return {"shuffle": False}


def _first(
    source: Source,
    batch: int,
    count: int,
    strategy: tf.distribute.Strategy,
    *,
    seed: int,
    shuffle: bool,
) -> dict[str, tf.Tensor]:
    """Returns the first examples of a source, [count, …] each, on the host."""
    pipeline = BatchPipeline(source, batch, seed=seed, shuffle=shuffle, resident=False)
    with tf.device("CPU:0"):
        return first_examples(pipeline, count, strategy)
