"""Allowed values and ranges of flags and arguments. Imports no TensorFlow."""

from typing import Literal, get_args

from ddl.errors import ConfigError

StrategyName = Literal[
    "auto",
    "one_device",
    "mirrored",
    "multi_worker_mirrored",
    "parameter_server",
    "central_storage",
    "tpu",
]
Mode = Literal["train_and_eval", "train", "eval", "export", "predict"]
Pin = Literal["none", "cores", "gpus"]
JitCompile = Literal["off", "auto", "on"]
BatchMoments = Literal["global", "per_replica"]
ClusterName = Literal["auto", "tf_config", "slurm", "none"]

STRATEGIES: tuple[str, ...] = get_args(StrategyName)
MODES: tuple[str, ...] = get_args(Mode)
PINS: tuple[str, ...] = get_args(Pin)
JIT_COMPILE: tuple[str, ...] = get_args(JitCompile)
BATCH_MOMENTS: tuple[str, ...] = get_args(BatchMoments)
CLUSTERS: tuple[str, ...] = get_args(ClusterName)

PREDICTIONS = (".jsonl", ".npz")

LARGEST_STEP = 2**53
"""Largest step that a schedule, which computes in float64, tells from the next one."""


_REMEDIES = {
    "RunPlan.train_steps": "Set TRAIN_STEPS to the number of updates of the run.",
    "RunPlan.train_epochs": "Set TRAIN_EPOCHS to the number of passes over the training data.",
    "RunPlan.eval_every": "Set EVAL_EVERY to a number of updates, or to None to evaluate only at "
    "the end.",
    "RunPlan.checkpoint_every": "Set CHECKPOINT_EVERY to a number of updates, or to None to save "
    "only at the end.",
    "RunPlan.log_every": "Set LOG_EVERY to a number of updates. A number beyond the length of the "
    "run logs only its end.",
    "RunPlan.max_rewinds": "Set it to a number of rewinds, or RunPlan.on_divergence = 'stop'.",
    "GLOBAL_BATCH_SIZE": "Set it to the number of examples of an update.",
    "PER_REPLICA_BATCH_SIZE": "Set it to the number of examples of an update on each replica.",
}


def check_above_0(name: str, value: float | None) -> None:
    """Raises ConfigError unless a number is above 0; None passes."""
    if value is not None and not value > 0:
        raise ConfigError(f"{name} must be greater than 0, got {value}. {_REMEDIES[name]}")


def check_at_least_1(name: str, value: int | None) -> None:
    """Raises ConfigError unless a number is at least 1; None passes."""
    if value is not None and value < 1:
        raise ConfigError(f"{name} must be at least 1, got {value}. {_REMEDIES[name]}")


def check_train_steps(value: int | None) -> None:
    """Raises ConfigError unless `RunPlan.train_steps` is in its range; None passes."""
    check_above_0("RunPlan.train_steps", value)
    if value is not None and value > LARGEST_STEP:
        raise ConfigError(
            f"RunPlan.train_steps must be at most 2^53 = {LARGEST_STEP:,}, got {value:,}. Set "
            "TRAIN_STEPS to a smaller number."
        )


def check_seed(value: int | None) -> None:
    """Raises ConfigError unless SEED is in its range; None passes, and a run then draws one."""
    if value is not None and not 0 <= value < 2**31:
        raise ConfigError(
            f"seed (macro SEED) must be from 0 to 2^31 - 1, got {value}. Set SEED to such a "
            "number, or to None, which draws one at the start of a run."
        )
