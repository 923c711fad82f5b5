"""The global batch size: the two ways to give it, and its split over replicas."""

from collections.abc import Mapping, Sequence

import tensorflow as tf

from ddl.choices import check_positive
from ddl.errors import ConfigError


def global_batch_size(total: int | None = None, per_replica: int | None = None) -> int:
    """Returns the global batch size, in examples. Call it in the strategy's scope.

    Args:
      total: Examples per update, for any number of replicas.
      per_replica: Examples per replica and update. The global batch, and with it the result of
        training, then depends on the number of replicas.

    Raises:
      ConfigError: If both are given, or neither, or if the size is not positive.
    """
    size = per_replica if total is None else total
    if size is None or (total is not None and per_replica is not None):
        raise ConfigError(
            "Exactly one of GLOBAL_BATCH_SIZE and PER_REPLICA_BATCH_SIZE must be given, got "
            f"{total} and {per_replica}. Set one of them to a number and the other to None."
        )
    check_positive("GLOBAL_BATCH_SIZE", total)
    check_positive("PER_REPLICA_BATCH_SIZE", per_replica)
    return size if per_replica is None else size * tf.distribute.get_strategy().num_replicas_in_sync


def sizes_by_source(
    global_batch_size: int | Mapping[str, int], sources: Sequence[str]
) -> dict[str, int]:
    """Returns the batch size of each source; one number is that of every source.

    Raises:
      ConfigError: If a size is missing, or belongs to no source.
    """
    if not isinstance(global_batch_size, Mapping):
        return dict.fromkeys(sources, global_batch_size)
    if global_batch_size.keys() != set(sources):
        named = ", ".join(sources) if sources != [""] else "one source without a name"
        raise ConfigError(
            f"Trainer.global_batch_size gives the sizes of {', '.join(global_batch_size)}, but "
            f"Trainer.train_data has {named}. Give each source one size, or all the same number."
        )
    return {name: global_batch_size[name] for name in sources}


_REMEDIES = {
    "global_batch_size": "Set it to the number of examples of an update.",
    "accumulation_steps": "Set it, or the macro ACCUMULATION_STEPS, to the number of microbatches "
    "of an update; 1 does not accumulate.",
}


def check_batch_split(
    global_batch_size: int | Mapping[str, int], replicas: int, accumulation_steps: int
) -> None:
    """Checks that the global batches divide into equal microbatches over the replicas.

    Raises:
      ConfigError: If the batch does not divide evenly, with the nearest sizes that do; or if a
        number is not an integer of at least 1.
    """
    if isinstance(global_batch_size, Mapping):
        for size in global_batch_size.values():
            check_batch_split(size, replicas, accumulation_steps)
        return
    sizes = {"global_batch_size": global_batch_size, "accumulation_steps": accumulation_steps}
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(
                f"Trainer.{name} must be an integer of at least 1, got {value!r}. {_REMEDIES[name]}"
            )
    unit = replicas * accumulation_steps
    if global_batch_size % unit:
        lower = global_batch_size // unit * unit
        nearest = [str(size) for size in (lower, lower + unit) if size > 0]
        raise ConfigError(
            f"The global batch size must be a multiple of {unit} ({replicas} replicas × "
            f"{accumulation_steps} accumulation steps), got {global_batch_size}. Use "
            f"{' or '.join(nearest)}, or change the number of devices."
        )
