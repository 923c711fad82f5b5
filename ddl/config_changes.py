"""What may change in the config of a run that goes on, and what is said about it."""

import dataclasses

from ddl import config
from ddl.console import RunConsole
from ddl.errors import ModelDirectoryError
from ddl.model_checks import depends_on_microbatches, layers_of
from ddl.plateau import plateau_of
from ddl.retention import Retention
from ddl.run_directory import RunDirectory
from ddl.trainer import Trainer

# A run may be lengthened, looked at more or less often, and split into other microbatches: the
# updates stay the same. Any other difference makes it another run.
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
    "Trainer.gradient_noise_scale",
    "GradientNoiseScale.decay",
)
_MICROBATCHES = "Trainer.accumulation_steps"
# It follows from the data and the batch size, which are compared with those of the checkpoint.
_STEPS_PER_EPOCH = ("epochs_to_steps.steps_per_epoch", "warmup_steps.steps_per_epoch")


def compare_with_saved_config(
    directory: RunDirectory, trainer: Trainer, console: RunConsole, strict: bool
) -> None:
    """Makes sure that a directory with checkpoints belongs to this config.

    Raises:
      ModelDirectoryError: If `strict` and it was written by another config.
    """
    saved = directory.saved_config()
    if saved is None:
        return
    may_change = {*_MAY_CHANGE, *_STEPS_PER_EPOCH}
    if plateau_of(trainer.optimizer) is not None:
        may_change.remove("RunPlan.eval_every")
    if changes := config.differences(saved, ignore=(*may_change, _MICROBATCHES)):
        listing = "\n".join(f"  {line}" for line in changes)
        if strict:
            raise ModelDirectoryError(
                f"--model_dir={directory.path} holds a run of another config. It differs in\n"
                f"{listing}\nGive a new --model_dir, or the config of that run."
            )
        console.line(f"the config differs from that of the run in {directory.path}:\n{listing}")
    other = config.differences(saved, ignore=may_change) if strict else []
    if other and depends_on_microbatches(layers_of(trainer.task)):
        console.line(
            f"{other[0]}: this model takes statistics, or draws at random, by microbatch. From "
            "here on it trains otherwise than it would have with the earlier number."
        )
