"""The macros STEPS_PER_EPOCH and TOTAL_STEPS, set by a run for use in its config.

Both follow from the training data, the batch size and the length of the run, which are built first.
The plan and the Trainer, which may use the macros, are built afterwards. Reading a macro before it
is set is an error: a None would look like a setting that is left out.
"""

from ddl import config
from ddl.data.conversion import sources_by_name
from ddl.data.pipeline import BatchPipeline
from ddl.errors import ConfigError
from ddl.run.plan import RunPlan
from ddl.training.checks import sizes_by_source
from ddl.training.trainer import Trainer

_FOLLOWS_FROM = {
    "STEPS_PER_EPOCH": "the training data and the batch size",
    "TOTAL_STEPS": "the training data, the batch size and TRAIN_STEPS or TRAIN_EPOCHS",
}


def withhold_lengths() -> None:
    """Makes it an error to read a macro that the config leaves open before `resolve_lengths`."""
    for name, follows_from in _FOLLOWS_FROM.items():
        if config.get_macro(name) is None:
            config.withhold_macro(
                name,
                f"%{name} is used before its value is known. It follows from {follows_from}; "
                "neither these nor SEED and PRECISION may use it. Write a number instead. For data "
                "without a known length (ddl.data.stream), set STEPS_PER_EPOCH.",
            )


def resolve_lengths() -> int | None:
    """Sets STEPS_PER_EPOCH and TOTAL_STEPS. Call it in the strategy's scope.

    Returns:
      Number of batches per epoch; None without data, batch size or a known length.

    If a run is lengthened, settings that depend on TOTAL_STEPS differ from the saved config, and
    the run cannot resume (`compare_with_saved_config`).

    Raises:
      ConfigError: If the config binds one of the macros to another number, or if the data, the
        batch size or the length of the run uses them.
    """
    data = config.build_bound("Trainer", "train_data")
    batch = config.build_bound("Trainer", "global_batch_size")
    if data is None or batch is None:
        for name in _FOLLOWS_FROM:
            config.set_macro(name, None)
        return None  # the Trainer reports the missing argument
    sources = sources_by_name(data)
    name, first = next(iter(sources.items()))
    pipeline = BatchPipeline(first, sizes_by_source(batch, list(sources))[name])
    train_epochs = config.build_bound("RunPlan", "train_epochs")
    if train_epochs is not None:
        pipeline.count_examples()
    batches = pipeline.steps_per_epoch
    if batches is None:  # the config may name a number for its schedules
        steps_per_epoch = config.get_macro("STEPS_PER_EPOCH")
        config.set_macro("STEPS_PER_EPOCH", steps_per_epoch)
    else:
        steps_per_epoch = _set_steps_per_epoch(batches)
    train_steps = config.build_bound("RunPlan", "train_steps")
    length = RunPlan(train_steps=train_steps, train_epochs=train_epochs)
    _set("TOTAL_STEPS", length.total_steps(steps_per_epoch))
    return batches


def check_lengths(batches: int | None, trainer: Trainer) -> None:
    """Checks STEPS_PER_EPOCH against the trainer, whose step may read several batches an update.

    Args:
      batches: Number of batches per epoch.
      trainer: The trainer.

    Raises:
      ConfigError: If the number differs.
    """
    if batches is None:
        return
    number = -(-batches // next(iter(trainer.pipelines.values())).batches_per_update)
    resolved = config.get_macro("STEPS_PER_EPOCH")
    if resolved != number:
        raise ConfigError(
            f"STEPS_PER_EPOCH must be {number}, as follows from the data and the number of batches "
            f"that the step reads in each update (update.next), got {resolved}. Add "
            f"STEPS_PER_EPOCH = {number} to the config."
        )


def _set_steps_per_epoch(batches: int) -> int:
    """Sets STEPS_PER_EPOCH to a number of batches, and returns it.

    A config may bind it to the length of an epoch for a step that reads several batches in each
    update; `check_lengths` then compares it with the trainer's.
    """
    given = config.get_macro("STEPS_PER_EPOCH")  # None while it is withheld
    if (
        isinstance(given, int)
        and 0 < given < batches
        and -(-batches // -(-batches // given)) == given
    ):
        return given
    _set("STEPS_PER_EPOCH", batches)
    return batches


def _set(name: str, value: int) -> None:
    given = config.get_macro(name)  # None while it is withheld
    if given not in (None, value):
        raise ConfigError(
            f"{name} must be {value}, as follows from the data, the batch size and the length of "
            f"the run, got {given}. Remove the binding, or pass --gin_param='{name} = None'."
        )
    config.set_macro(name, value)
