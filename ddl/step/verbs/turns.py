"""The position of a step in its control flow: turns of its repeats, and branches."""

import dataclasses
from typing import Any

import tensorflow as tf

from ddl.errors import ConfigError

_TURNS_WITHIN = 2**12
"""Largest number of turns of a repeat within a repeat; more turns would draw equal numbers."""

_TURNS_AROUND = _TURNS_WITHIN - 1
"""Largest number of turns of a repeat around another; the numbers of all turns have 24 bits."""


@dataclasses.dataclass(frozen=True)
class Turns:
    """The present turn of `update.repeat`, and whether it is within `update.when`.

    Attributes:
      number: Number of the turn for random draws, int64 []; None outside of repeats.
      repeats: Number of repeats around.
      is_always: Whether each update comes here exactly once.
      count: Number of turns of all repeats around; None if it depends on a tensor.
      place: Number of the turn among `count`, a Python integer or int32 [].
      times: Number of turns of the innermost repeat around; None if there is none, or if it depends
        on a tensor.
    """

    number: tf.Tensor | None = None
    repeats: int = 0
    is_always: bool = True
    count: int | None = 1
    place: int | tf.Tensor = 0
    times: int | None = None

    def in_branch(self) -> "Turns":
        """Returns the turns within `update.when`."""
        return dataclasses.replace(self, is_always=False, count=None)

    def in_turn(self, turn: tf.Tensor, times: tf.Tensor) -> "Turns":
        """Returns the turns within a turn, int64 [], of a further repeat of `times`, int64 []."""
        first = 0 if self.number is None else (self.number + 1) * _TURNS_WITHIN
        known = tf.get_static_value(times)
        if known is None or self.count is None:
            known = None if known is None else int(known)
            return Turns(first + turn, self.repeats + 1, is_always=False, count=None, times=known)
        return Turns(
            first + turn,
            self.repeats + 1,
            is_always=False,
            count=self.count * int(known),
            place=self.place * int(known) + tf.cast(turn, tf.int32),
            times=int(known),
        )

    def check_repeat(self, times: Any) -> tf.Tensor:
        """Returns the number of turns of a further repeat, int64 [].

        Raises:
          ConfigError: If it is not an integer, the repeat is within two others, or it is within
            another one and one of the two has too many turns.
        """
        try:
            given = tf.convert_to_tensor(times)
        except (TypeError, ValueError):
            given = None
        if given is None or not given.dtype.is_integer or given.shape.rank != 0:
            raise ConfigError(
                f"update.repeat: times must be an integer, got {times!r:.80}. An integer scalar "
                "tensor is one, too."
            )
        if (known := tf.get_static_value(given)) is not None and known < 0:
            raise ConfigError(f"update.repeat: times must be at least 0, got {known}.")
        if self.repeats > 1:
            raise ConfigError(
                "update.repeat can be nested in one other update.repeat, not in two, got a third "
                "level. Make one repeat of two of them, with the product of their turns."
            )
        if self.repeats == 1:
            _check_number("within another one", known, _TURNS_WITHIN)
            _check_number("around another one", self.times, _TURNS_AROUND)
            checks = []
            if known is None:
                checks.append(_checked_later("within another one", given, _TURNS_WITHIN))
            if self.times is None and self.number is not None:
                checks.append(_checked_later("around another one", self.number + 1, _TURNS_AROUND))
            with tf.control_dependencies(checks):
                given = tf.identity(given)
        return tf.cast(given, tf.int64)


def _check_number(where: str, times: Any, most: int) -> None:
    """Raises ConfigError if a nested repeat has too many turns; None: their number is unknown."""
    if times is not None and times > most:
        raise ConfigError(f"{_too_many(where, most)}, got {times:,}. {_REMEDY}")


def _checked_later(where: str, turns: tf.Tensor, most: int) -> tf.Operation:
    """Returns an operation that fails if a number of turns, an integer [], is too large."""
    holds = tf.cast(turns, tf.int64) <= most
    return tf.debugging.Assert(holds, [f"{_too_many(where, most)}. {_REMEDY} Got:", turns])


def _too_many(where: str, most: int) -> str:
    return (
        f"update.repeat {where} can have at most {most:,} turns, or two turns would draw the same "
        "random numbers"
    )


_REMEDY = "Make one repeat with the turns of both, or split the longer one."
