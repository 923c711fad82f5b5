"""The trainer of a config, for a check on its first examples."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ddl import config
from ddl.checking.checked import SEED, UPDATES
from ddl.data.combine import subset
from ddl.data.conversion import sources_by_name
from ddl.data.source import Source
from ddl.data.stream import Stream
from ddl.errors import ConfigError
from ddl.run.plan import training_data
from ddl.training.trainer import Trainer


@dataclasses.dataclass(frozen=True)
class TrainerOfConfig:
    """Function that makes the trainer of a config, in float64 and on its first examples.

    Attributes:
      files: The gin files.
      params: Further bindings.
      search_path: Folders to search for the files.
      allow_unused: Names of bindings that may go unused.
    """

    files: Sequence[str]
    params: Sequence[str] = ()
    search_path: Sequence[str] = ()
    allow_unused: Sequence[str] = ()

    def __call__(self, strategy: tf.distribute.Strategy) -> Trainer:
        """Loads the config anew, with gin's singletons, and builds the trainer.

        Raises:
          ConfigError: If the config is invalid, or binds PER_REPLICA_BATCH_SIZE.
        """
        params = [*self.params, "set_numerics.precision = 'float64'"]
        config.load(self.files, params, self.search_path, self.allow_unused)
        if config.get_macro("PER_REPLICA_BATCH_SIZE") is not None:
            raise ConfigError(
                "PER_REPLICA_BATCH_SIZE makes the global batch, and with it the result, depend on "
                "the number of replicas. Check the task with --gin_param='PER_REPLICA_BATCH_SIZE = "
                "None' and --gin_param='GLOBAL_BATCH_SIZE = 64'."
            )
        if config.get_macro("SEED") is None:
            config.set_macro("SEED", SEED)
        config.build("set_numerics")
        data = {"train_data": training_data()}
        batch = config.build_bound("Trainer", "global_batch_size")
        data["eval_data"] = config.build_bound("Trainer", "eval_data")
        short = {name: _cut(one, batch) for name, one in data.items() if one is not None and batch}
        return config.build("Trainer", strategy=strategy, **short)


def _cut(data: Any, batch: int | Mapping[str, int]) -> Any:
    """Returns data of the config, or each of several by name, cut to a few batches."""
    sources = sources_by_name(data)
    sizes = batch if isinstance(batch, Mapping) else {"": batch}
    first = next(iter(sizes.values()))
    short = {name: first_examples(one, sizes.get(name, first)) for name, one in sources.items()}
    return short.get("", short)


def first_examples(source: Source | Stream, batch: int) -> Source | Stream:
    """Returns the first examples of a source, with floats in float64; a stream as it is.

    The last batch has one row more than half of its rows, so that on four devices one has padding
    alone and another has padding and an example.

    Args:
      source: The source.
      batch: The global batch size.
    """
    if isinstance(source, Stream):
        return source
    full = min((len(source) - 1) // batch, UPDATES - 1)
    rest = max(1, min(batch // 2 + 1, batch - 1))
    short = subset(source, min(len(source), full * batch + rest))
    if short.decode is not None:
        return Source(short.items, functools.partial(_decoded, short))
    rows = short.rows(np.arange(len(short)))
    return Source({n: v.astype(np.float64) if _widens(n, v.dtype) else v for n, v in rows.items()})


def _decoded(source: Source, item: dict[str, tf.Tensor], seed: tf.Tensor) -> dict[str, tf.Tensor]:
    """Returns what the source's own `decode` makes of an item, with floats in float64."""
    return {
        name: tf.cast(value, tf.float64) if _widens(name, value.dtype.as_numpy_dtype) else value
        for name, value in source.decoded(item, seed).items()
    }


def _widens(name: str, dtype: Any) -> bool:
    """Returns whether a feature becomes float64; "weight" stays float32 in ddl."""
    return np.dtype(dtype).kind == "f" and name != "weight"
