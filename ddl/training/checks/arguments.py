"""Types of the Trainer's arguments, which in a config are checked by their annotations."""

import dataclasses
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from ddl.choices import BATCH_MOMENTS, JIT_COMPILE, BatchMoments, JitCompile
from ddl.distribution.communication import Communication
from ddl.errors import ConfigError, check_choice
from ddl.metrics import OfAllOutputs
from ddl.precision import LossScale
from ddl.step.gradients import Limit
from ddl.step.remat import Remat
from ddl.step.weight_average import ExponentialMovingAverage

_NUMBERS = {"an integer": numbers.Integral, "a number": numbers.Real}


def check_number(name: str, value: Any, wanted: str, *, optional: bool = False) -> None:
    """Raises ConfigError if an argument of the Trainer is not a number.

    Args:
      name: Name of the argument.
      value: Its value.
      wanted: `an integer` or `a number`.
      optional: Whether None is allowed.
    """
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, _NUMBERS[wanted]):
        raise ConfigError(_text(name, value, wanted + (", or None" if optional else "")))


def check_strategy(strategy: Any) -> None:
    """Raises ConfigError if the argument `strategy` is neither a strategy nor None."""
    example = "ddl.distribution.build_strategy('mirrored')"
    check_instance("strategy", strategy, tf.distribute.Strategy, example)


def check_flag(name: str, value: Any, *, auto: bool = False) -> None:
    """Raises ConfigError if an argument of the Trainer is neither True nor False.

    Args:
      name: Name of the argument.
      value: Its value.
      auto: Whether "auto" is allowed.
    """
    if isinstance(value, (bool, np.bool_)) or (auto and isinstance(value, str) and value == "auto"):
        return
    raise ConfigError(_text(name, value, "True, False or 'auto'" if auto else "True or False"))


def check_instance(name: str, value: Any, kind: type, example: str, *, auto: bool = False) -> None:
    """Raises ConfigError if an argument of the Trainer is not None or an object of a class.

    Args:
      name: Name of the argument.
      value: Its value.
      kind: The class.
      example: Code that makes such an object.
      auto: Whether "auto" is allowed.
    """
    if (
        value is None
        or isinstance(value, kind)
        or (auto and isinstance(value, str) and value == "auto")
    ):
        return
    other = "'auto' or None" if auto else "or None"
    raise ConfigError(f"{_text(name, value, f'a {kind.__name__}, {other}')} Pass {example}.")


def check_one_data_set(method: str, data: Any, others: Sequence[Any]) -> None:
    """Raises ConfigError unless a method of the Trainer got one data set or none.

    Args:
      method: Name of the method.
      data: The first argument.
      others: The other positional arguments.
    """
    if others:
        raise ConfigError(
            f"{method} takes one data set, got {1 + len(others)} positional arguments. Pass a pair "
            f"(inputs, labels) as one argument, {method}((x, y)), and averaged by name."
        )
    if isinstance(data, bool):
        raise ConfigError(f"{method} takes a data set, got {data!r}. Pass averaged by name.")


def _text(name: str, value: Any, wanted: str) -> str:
    return f"Trainer.{name} must be {wanted}, got {value!r:.80}."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments of `ddl.Trainer` that its parts read; each means what it means there."""

    global_batch_size: int | Mapping[str, int]
    corpus_metrics: OfAllOutputs | Sequence[OfAllOutputs]
    seed: int
    shuffle: bool
    accumulation_steps: int
    batch_moments: BatchMoments
    clip_norm: Limit
    weight_average: ExponentialMovingAverage | None
    loss_scale: LossScale | Literal["auto"] | None
    data_on_device: bool | Literal["auto"]
    communication: Communication | None
    jit_compile: JitCompile
    remat: Remat | None
    shard_optimizer_state: bool
    max_skipped_updates: int

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> "Options":
        """Takes the options from all arguments of `ddl.Trainer`, by their names."""
        return cls(**{field.name: arguments[field.name] for field in dataclasses.fields(cls)})

    def __post_init__(self) -> None:
        check_number("seed", self.seed, "an integer")
        limits = self.clip_norm
        for limit in limits.values() if isinstance(limits, Mapping) else [limits]:
            check_number("clip_norm", limit, "a number", optional=True)
        check_number("max_skipped_updates", self.max_skipped_updates, "an integer")
        check_flag("shuffle", self.shuffle)
        check_flag("data_on_device", self.data_on_device, auto=True)
        check_flag("shard_optimizer_state", self.shard_optimizer_state)
        check_choice("Trainer.jit_compile", self.jit_compile, JIT_COMPILE)
        check_choice("Trainer.batch_moments", self.batch_moments, BATCH_MOMENTS)
        for name, kind, example in (
            ("weight_average", ExponentialMovingAverage, "ddl.ExponentialMovingAverage()"),
            ("communication", Communication, "ddl.distribution.Communication()"),
            ("remat", Remat, "ddl.Remat()"),
        ):
            check_instance(name, getattr(self, name), kind, example)
        check_instance("loss_scale", self.loss_scale, LossScale, "ddl.LossScale()", auto=True)
        if self.max_skipped_updates < 1:
            raise ConfigError(
                f"Trainer.max_skipped_updates must be at least 1, got {self.max_skipped_updates}."
            )
