"""Allowed values and ranges of flags and arguments. Imports no TensorFlow."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, get_args, get_origin, get_type_hints

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
JitCompile = Literal["off", "auto", "on"]
BatchMoments = Literal["global", "per_replica"]
ClusterName = Literal["auto", "tf_config", "slurm", "none"]

STRATEGIES: tuple[str, ...] = get_args(StrategyName)
MODES: tuple[str, ...] = get_args(Mode)
JIT_COMPILE: tuple[str, ...] = get_args(JitCompile)
CLUSTERS: tuple[str, ...] = get_args(ClusterName)

PREDICTIONS = (".jsonl", ".npz")


def check_positive(name: str, value: float | None) -> None:
    """Raises ConfigError unless a number is above 0; None passes."""
    if value is not None and not value > 0:
        raise ConfigError(f"{name} must be greater than 0, got {value}. Set it to a larger number.")


def check_count(name: str, value: object) -> None:
    """Raises ConfigError unless a value is an integer of at least 1."""
    if type(value) is not int or value < 1:
        raise ConfigError(f"{name} must be an integer of at least 1, got {value!r:.60}.")


def check_seed(value: int | None) -> None:
    """Raises ConfigError unless SEED is in its range; None passes, and a run then draws one."""
    if value is not None and not 0 <= value < 2**31:
        raise ConfigError(
            f"seed (macro SEED) must be from 0 to 2^31 - 1, got {value}. Set SEED to such a "
            "number, or to None, which draws one at the start of a run."
        )


def check_types(
    function: Callable[..., Any], given: Mapping[str, Any], checked_elsewhere: Sequence[str]
) -> None:
    """Raises ConfigError if an argument has another type than its annotation.

    Args:
      function: The function or constructor, for its name and annotations.
      given: Its arguments by name.
      checked_elsewhere: Names of arguments to leave out.
    """
    import typeguard  # which `--help` need not wait for

    for name, kind in get_type_hints(function).items():
        if name in checked_elsewhere or kind is Any:
            continue
        value, wanted = given[name], inspect.formatannotation(kind)
        with suppress(typeguard.TypeCheckError):
            typeguard.check_type(value, kind)
            is_number = isinstance(value, bool) and "bool" not in wanted
            is_sequence = isinstance(value, str) and get_origin(kind) is Sequence
            if not (is_number or is_sequence):
                continue
        owner = function.__qualname__.removesuffix(".__init__")
        raise ConfigError(f"{owner}.{name} must be {wanted}, got {value!r:.80}.")
