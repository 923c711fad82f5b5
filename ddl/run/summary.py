"""The start-up summary of a run, and notes on its strategy."""

from collections.abc import Callable

import keras
import numpy as np

from ddl import config
from ddl.data.pipeline import BatchPipeline
from ddl.distribution.devices import describe_devices
from ddl.distribution.traits import traits_of
from ddl.errors import ConfigError
from ddl.optimizers.groups import ONLY, by_name, frozen_until
from ddl.run.checks.gpu_notes import gpu_notes
from ddl.run.checks.learning_rate import learning_rate_summary
from ddl.run.checks.servers import bytes_of_servers, unevenly_held
from ddl.tasks.parts import models_of
from ddl.training.trainer import Trainer


def notes(trainer: Trainer) -> list[str]:
    """Returns notes on strategy, servers, GPUs, and on the memory that an own step takes."""
    found = [note] if (note := traits_of(trainer.strategy).note) else []
    found += unevenly_held(trainer)
    return [*found, *gpu_notes(trainer.strategy, trainer.training_layers)]


def summary(trainer: Trainer, total: int) -> dict[str, str]:
    """Returns the start-up summary of a run as texts by name.

    Args:
      trainer: The trainer of the run.
      total: Length of the run in steps.

    Raises:
      ConfigError: If the learning rate is unusable; see `learning_rate_summary`.
    """
    replicas = trainer.strategy.num_replicas_in_sync
    models = ", ".join(
        f"{model.name}, {_parameters(model):,} trainable parameters"
        for model in models_of(trainer.task).values()
    )
    steps_per_epoch = trainer.steps_per_epoch
    return {
        "devices": f"{describe_devices(trainer.strategy)}, {type(trainer.strategy).__name__}",
        **bytes_of_servers(trainer),
        "replicas": str(replicas),
        "global batch size": _of_sources(trainer, lambda pipeline: _split(pipeline, replicas)),
        "batch per replica": _of_sources(
            trainer, lambda pipeline: f"{pipeline.global_batch_size // replicas:,}"
        ),
        "precision": keras.config.dtype_policy().name,
        "model": models,
        "training data": _of_sources(
            trainer,
            _examples,
        ),
        "weight average": str(trainer.averages.rule) if trainer.averages else "none",
        "steps": f"{total:,}"
        + (f" ({total / steps_per_epoch:.1f} epochs)" if steps_per_epoch else ""),
        **_learning_rates(trainer, total),
        "seed": str(config.get_macro("SEED")),
    }


def _of_sources(trainer: Trainer, describe: Callable[[BatchPipeline], str]) -> str:
    """Describes the sources of training data; with its name, if there are several."""
    described = {name: describe(pipeline) for name, pipeline in trainer.pipelines.items()}
    return "; ".join(f"{name} {text}" if name else text for name, text in described.items())


def _examples(pipeline: BatchPipeline) -> str:
    if pipeline.num_examples is None:
        return "examples without a known end"
    return f"{pipeline.num_examples:,} examples, {pipeline.steps_per_epoch:,} steps per epoch"


def _split(pipeline: BatchPipeline, replicas: int) -> str:
    """Describes how the batches of an update are divided."""
    parts = [
        f"{number} {what} × "
        for number, what in ((replicas, "replicas"), (pipeline.microbatches, "microbatches"))
        if number > 1
    ]
    size = pipeline.global_batch_size
    rest = f" = {''.join(parts)}{size // replicas // pipeline.microbatches:,}" if parts else ""
    several = pipeline.batches_per_update
    return f"{several} × {size:,}{rest}" if several > 1 else f"{size:,}{rest}"


def _parameters(model: keras.Model) -> int:
    return sum(int(np.prod(v.shape)) for v in model.trainable_variables)


def _learning_rates(trainer: Trainer, total: int) -> dict[str, str]:
    """Describes the learning rate of each optimizer.

    Raises:
      ConfigError: If a rate is unusable, or a parameter group stays frozen.
    """
    described: dict[str, str] = {}
    frozen = frozen_until(trainer.optimizer)
    for name, optimizer in by_name(trainer.optimizer).items():
        of = "" if name == ONLY else f" ({name})"
        updates = trainer.updates_per_step[name]
        if (first := frozen[name]) >= total > 0:
            raise ConfigError(
                f"The parameter group {name!r} is frozen until step {first:,}, but the run ends at "
                f"step {total:,}, so it would never be trained. Lower Group.frozen_until, train "
                "longer, or freeze its layers with trainable = False."
            )
        texts = learning_rate_summary(optimizer, (total - first) * (updates or 1))
        if first:
            texts["frozen"] = f"until step {first:,}; the schedule begins there"
        if updates != 1:
            often = "depends on the step" if updates is None else f"{updates} each step"
            texts["updates"] = f"{often}; the learning rate follows the optimizer's own count"
        described |= {f"{what}{of}": text for what, text in texts.items()}
    return described
