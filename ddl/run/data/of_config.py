"""The data of a config alone, without model, optimizer and devices."""

from typing import Any

from ddl import config
from ddl.data.conversion import sources_by_name
from ddl.data.pipeline import BatchPipeline
from ddl.data.source import Source
from ddl.errors import ConfigError
from ddl.run.lengths import withhold_lengths
from ddl.seeds import hashed
from ddl.training.checks.batch_size import sizes_by_source

_SEED = 0


def sources_of_config(part: str) -> dict[str, Source]:
    """Builds the training or the evaluation data of the loaded config.

    Args:
      part: "train" or "eval".

    Returns:
      The sources by name; the name is "" if there is only one.

    Raises:
      ConfigError: If the config binds no such data.
      DataError: If the data cannot be read.
    """
    withhold_lengths()
    if config.get_macro("SEED") is None:
        config.set_macro("SEED", _SEED)
    name = f"{part}_data"
    data = config.build_bound("Trainer", name)
    if data is None:
        raise ConfigError(f"The config has no {part} data. Bind Trainer.{name}.")
    return sources_by_name(data)


def pipelines_of_config(part: str) -> dict[str, BatchPipeline]:
    """Builds the pipelines of the loaded config's data, with the run's order of the examples.

    Args:
      part: "train" or "eval".

    Raises:
      ConfigError: As `sources_of_config`, or if the config binds no batch size.
      DataError: If the data cannot be read.
    """
    sources = sources_of_config(part)
    batch: Any = config.build_bound("Trainer", "global_batch_size")
    if batch is None:
        raise ConfigError(
            "This command needs the batch size, but the config does not give it "
            "(Trainer.global_batch_size is None). Set GLOBAL_BATCH_SIZE in the config."
        )
    sizes = sizes_by_source(batch, list(sources))
    shuffle = config.build_bound("Trainer", "shuffle")
    seed = int(config.get_macro("SEED"))
    return {
        name: BatchPipeline(
            source,
            sizes[name],
            seed=seed,
            order_seed=hashed(seed, name) if name else seed,
            shuffle=part == "train" and shuffle is not False,
            resident=False,
        )
        for name, source in sources.items()
    }
