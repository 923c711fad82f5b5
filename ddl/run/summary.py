"""The start-up summary of a run, with a check of its learning rates."""

import math

import keras
import numpy as np

from ddl import config
from ddl.data.pipeline import BatchPipeline
from ddl.distribution.devices import describe_devices
from ddl.distribution.traits import traits_of
from ddl.errors import ConfigError
from ddl.optimizers.groups import ONLY, by_name, frozen_until
from ddl.optimizers.learning_rate import LearningRate, learning_rate_at
from ddl.optimizers.plateau import plateau_of
from ddl.tasks.parts import models_of
from ddl.training.trainer import Trainer


def summary(trainer: Trainer, total: int) -> dict[str, str]:
    """Returns the start-up summary of a run as texts by name.

    Args:
      trainer: The trainer of the run.
      total: Length of the run in steps.

    Raises:
      ConfigError: If a learning rate is unusable, or a parameter group stays frozen.
    """
    replicas, steps_per_epoch = trainer.strategy.num_replicas_in_sync, trainer.steps_per_epoch
    models = [
        f"{model.name}, {sum(int(np.prod(v.shape)) for v in model.trainable_variables):,} "
        "trainable parameters"
        for model in models_of(trainer.task).values()
    ]
    sources = trainer.pipelines.items()
    epochs = f" ({total / steps_per_epoch:.1f} epochs)" if steps_per_epoch else ""
    note = traits_of(trainer.strategy).note
    return {
        **({"strategy": note} if note else {}),
        "devices": f"{describe_devices(trainer.strategy)}, {type(trainer.strategy).__name__}",
        "replicas": str(replicas),
        "global batch size": "; ".join(
            f"{n} {_batch(one, replicas)}".strip() for n, one in sources
        ),
        "precision": keras.config.dtype_policy().name,
        "model": ", ".join(models),
        "training data": "; ".join(f"{name} {_examples(one)}".strip() for name, one in sources),
        "steps": f"{total:,}{epochs}",
        **_learning_rates(trainer, total),
        "seed": str(config.get_macro("SEED")),
    }


def _examples(pipeline: BatchPipeline) -> str:
    if pipeline.num_examples is None:
        return "examples without a known end"
    return f"{pipeline.num_examples:,} examples, {pipeline.steps_per_epoch:,} steps per epoch"


def _batch(pipeline: BatchPipeline, replicas: int) -> str:
    """Describes how the batches of an update are divided."""
    size, each = pipeline.global_batch_size, pipeline.microbatches
    several = f"{pipeline.batches_per_update} × " if pipeline.batches_per_update > 1 else ""
    if replicas * each == 1:
        return f"{several}{size:,}"
    microbatches = f" × {each} microbatches" if each > 1 else ""
    return (
        f"{several}{size:,} = {replicas} replicas{microbatches} × {size // replicas // each:,}, "
        f"{size // replicas:,} per replica"
    )


def _learning_rates(trainer: Trainer, total: int) -> dict[str, str]:
    """Describes the learning rate of each optimizer; refuses one that is unusable."""
    described: dict[str, str] = {}
    frozen = frozen_until(trainer.optimizer)
    for name, optimizer in by_name(trainer.optimizer).items():
        if (first := frozen[name]) >= total > 0:
            raise ConfigError(
                f"The parameter group {name!r} is frozen until step {first:,}, but the run ends at "
                f"step {total:,}, so it would never be trained. Lower Group.frozen_until, train "
                "longer, or freeze its layers with trainable = False."
            )
        texts = _learning_rate(optimizer, (total - first) * (trainer.updates_per_step[name] or 1))
        of = "" if name == ONLY else f" ({name})"
        described |= {f"{what}{of}": text for what, text in texts.items()}
    return described


def _learning_rate(optimizer: keras.optimizers.Optimizer, steps: int) -> dict[str, str]:
    """Describes a learning rate over a run; refuses one that is unusable at a sampled step."""
    plateau = plateau_of(optimizer)
    schedule = plateau.schedule if plateau else optimizer._learning_rate
    sampled = {round(place * max(steps - 1, 0) / 20) for place in range(21)}
    description = {}
    if isinstance(schedule, LearningRate):
        if schedule.warmup_steps >= steps:
            raise ConfigError(
                f"The warm-up must be shorter than the run of {steps:,} updates, got "
                f"{schedule.warmup_steps:,} warm-up updates. Lower WARMUP_STEPS or WARMUP_EPOCHS, "
                "or train longer."
            )
        sampled.add(schedule.warmup_steps)
        description = schedule.description()
    if plateau is not None:
        description["on a plateau"] = plateau.description()
    rates = {step: learning_rate_at(optimizer, step) for step in sorted(sampled)}
    for step, rate in rates.items():
        if not 0 <= rate < math.inf:
            raise ConfigError(
                f"The learning rate must be finite and at least 0, got {rate:g} at update {step:,}."
                " Check LEARNING_RATE and the arguments of the schedule."
            )
    peak, last = max(rates.values()), rates[max(steps - 1, 0)]
    if not peak > 0:
        raise ConfigError("The learning rate is 0 at each update, got 0. Raise LEARNING_RATE.")
    end = f", {last:.6g} at the end" if last != peak else ""
    return {"learning rate": f"{peak:.6g} at its peak{end}", **description}
