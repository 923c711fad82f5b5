"""Comparison of a resumed run's config with the saved one."""

import dataclasses
import re
from collections.abc import Collection

from ddl import callbacks, config
from ddl.callbacks.early_stopping import EarlyStopping
from ddl.checkpoints.retention import Retention
from ddl.config.statements import read_values
from ddl.errors import ConfigError, ModelDirectoryError
from ddl.optimizers.plateau import plateaus_of
from ddl.run.console import RunConsole
from ddl.run.directory import RunDirectory
from ddl.run.predicting.settings import Predictions
from ddl.run.trackers import MLflow, WeightsAndBiases
from ddl.step.remat import Remat
from ddl.training.checks import depends_on_microbatches
from ddl.training.trainer import Trainer

# A resumed run may change its length, its periods and its microbatches: the updates stay the same.
# Any other difference makes it another run.
_MAY_CHANGE = (
    "RunPlan.train_steps",
    "RunPlan.train_epochs",
    "RunPlan.eval_every",
    "RunPlan.checkpoint_every",
    "RunPlan.log_every",
    "RunPlan.retention",
    *(f"Retention.{field.name}" for field in dataclasses.fields(Retention)),
    "RunPlan.on_divergence",
    "RunPlan.max_rewinds",
    "RunPlan.early_stopping",
    *(f"EarlyStopping.{field.name}" for field in dataclasses.fields(EarlyStopping)),
    *(f"Predictions.{field.name}" for field in dataclasses.fields(Predictions)),
    "RunPlan.trackers",
    *(f"MLflow.{field.name}" for field in dataclasses.fields(MLflow)),
    *(f"WeightsAndBiases.{field.name}" for field in dataclasses.fields(WeightsAndBiases)),
    "Trainer.remat",
    *(f"Remat.{field.name}" for field in dataclasses.fields(Remat)),
)
# Bindings of callbacks, in any scope, without those of the functions that they call.
_OF_CALLBACKS = re.compile(
    rf"(?:[\w./-]+/)?(?:{'|'.join(callbacks.__all__)})\.|RunPlan\.callbacks:"
)
_MICROBATCHES = "Trainer.accumulation_steps"
# These follow from data and batch size, which are compared with the checkpoint's metadata.
_STEPS_PER_EPOCH = ("epochs_to_steps.steps_per_epoch", "warmup_steps.steps_per_epoch")


def compare_with_saved_config(
    directory: RunDirectory, trainer: Trainer, console: RunConsole, strict: bool
) -> None:
    """Compares the loaded config with the one saved in the directory, if any.

    Args:
      directory: The directory of the run.
      trainer: The built trainer. With a `ReduceOnPlateau`, `RunPlan.eval_every` may not change.
      console: Prints the differences if not `strict`; if `strict`, prints a note when the number of
        microbatches changed and the model depends on it.
      strict: Whether a difference is an error, as when a run resumes.

    Raises:
      ModelDirectoryError: If `strict` and the configs differ, or if the saved config cannot be
        read.
    """
    saved = directory.saved_config()
    if saved is None:
        return
    may_change = {*_MAY_CHANGE, *_STEPS_PER_EPOCH}
    if plateaus_of(trainer.optimizer):
        may_change.remove("RunPlan.eval_every")
    try:
        changes = _differences(saved, {*may_change, _MICROBATCHES})
    except (ConfigError, ValueError, RecursionError) as error:
        raise ModelDirectoryError(
            f"{directory.operative_config} must be the config that ddl saved, but it cannot be "
            f"read: {error}\nRestore the file from a backup, or pass another --model_dir."
        ) from error
    if strict and (of_callbacks := [line for line in changes if _OF_CALLBACKS.match(line)]):
        changes = [line for line in changes if line not in of_callbacks]
        console.line(
            "The callbacks differ from those of the run so far (saved → given); the resumed run "
            "calls the given ones:\n" + "\n".join(f"  {line}" for line in of_callbacks)
        )
    if changes:
        listing = "\n".join(f"  {line}" for line in changes)
        if strict:
            raise ModelDirectoryError(
                f"--model_dir={directory.path} holds a run with another config. The differences "
                f"(saved → given):\n{listing}\nPass another --model_dir, or the config of that "
                "run."
            )
        console.line(
            f"The config differs from that of the run in {directory.path} (saved → given):\n"
            f"{listing}"
        )
    other = _differences(saved, may_change) if strict else []
    if other and depends_on_microbatches(trainer.training_layers):
        console.line(
            f"{other[0]}. This model computes statistics or draws random numbers per microbatch, "
            "so the resumed run computes other updates than with the earlier number."
        )


def _differences(saved_text: str, ignore: Collection[str]) -> list[str]:
    """Returns lines such as `cnn.filters: (32, 64) → (32,)` for two operative configs.

    Args:
      saved_text: The operative config of the run so far.
      ignore: Bindings that may differ, by their shortest names, such as `RunPlan.train_steps`.
    """
    saved, given = map(read_values, (saved_text, config.operative_config_text()))
    unset = ("not set", "not set")
    found: dict[str, None] = {}  # Differences due to one macro are one line.
    for name in {**saved, **given}:
        (raw, before), (other, after) = saved.get(name, unset), given.get(name, unset)
        is_macro = repr(raw).startswith("%") and raw == other
        if before != after and name not in ignore and not name.endswith("/gin.macro.value"):
            shown = repr(raw)[1:] if is_macro else name
            found[f"{shown}: {before!r} → {after!r}"] = None
    return list(found)
