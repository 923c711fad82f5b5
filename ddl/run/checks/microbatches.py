"""Updates with a number of microbatches, for `--fit_memory`."""

from collections.abc import Callable
from typing import TypedDict

import tensorflow as tf

from ddl import config
from ddl.distribution.workers import Workers
from ddl.errors import ConfigError
from ddl.run.placement import Placement
from ddl.run.train import build
from ddl.tasks.parts import seed_generators_of
from ddl.training.checks.model import names_that_depend_on_microbatches
from ddl.training.loop.device_errors import device_errors
from ddl.training.trainer import Trainer

_MACRO = "ACCUMULATION_STEPS"


class FactsOfRun(TypedDict):
    """Facts about a run.

    Attributes:
      sizes: Examples per replica and update of each source of training data, by its name.
      configured: ACCUMULATION_STEPS of the config.
      depends_on: Reasons why the result depends on the number of microbatches; empty if none.
      evaluates: Whether the run has evaluation data.
    """

    sizes: dict[str, int]
    configured: int
    depends_on: list[str]
    evaluates: bool


def make_updates(
    placement: Placement, number: int, updates: int, built: Callable[[FactsOfRun], None]
) -> bool:
    """Builds the run of the loaded config, and makes some updates.

    Args:
      placement: Strategy, communication and the other settings from flags.
      number: Value for ACCUMULATION_STEPS.
      updates: Number of updates.
      built: Takes the facts when the run is built.

    Returns:
      Whether they fit into memory.

    Raises:
      DdlError: If the run cannot be built, or an update fails otherwise.
    """
    configured = config.get_macro(_MACRO)
    config.set_macro(_MACRO, number)
    try:
        with device_errors():
            _, trainer = build(placement, Workers(placement.strategy))
            if trainer.accumulation_steps != number:
                raise ConfigError(
                    f"--fit_memory sets the macro {_MACRO}, but the config binds "
                    f"Trainer.accumulation_steps = {trainer.accumulation_steps}. Bind it to "
                    f"%{_MACRO}, as ddl/standard.gin does."
                )
            built(_facts(trainer, configured or 1))
            trainer.train(updates, progress=False)
    except Exception as error:
        if not _is_out_of_memory(error):
            raise
        return False
    return True


def _facts(trainer: Trainer, configured: int) -> FactsOfRun:
    replicas = trainer.strategy.num_replicas_in_sync
    drawing = [type(trainer.task).__name__] if seed_generators_of(trainer.task) else []
    return {
        "sizes": {
            name: pipeline.global_batch_size // replicas
            for name, pipeline in trainer.pipelines.items()
        },
        "configured": configured,
        "depends_on": [
            *names_that_depend_on_microbatches(trainer.training_layers),
            *drawing,
        ],
        "evaluates": trainer.has_eval_data,
    }


def _is_out_of_memory(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, MemoryError | tf.errors.ResourceExhaustedError):
            return True
        error = error.__cause__
    return False
