"""The errors that ddl raises on purpose: each says what is wrong, where, and what to do.

``ddl.main`` prints such an error's message alone, without a traceback, and exits with its
``exit_status``. Anything else that escapes is a bug or the system's doing: it keeps its traceback,
and the process exits with `UNEXPECTED_STATUS`.
"""

from collections.abc import Sequence

# sysexits.h calls it EX_SOFTWARE. Started again the process may do better, as with a full memory.
UNEXPECTED_STATUS = 70


class DdlError(Exception):
    """Base of all errors meant for the person who started the run."""

    exit_status = 1


class ConfigError(DdlError, ValueError):
    """A value, a binding or a flag that cannot be used as given."""


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raises a ConfigError unless `value` is one of `choices`."""
    if value not in choices:
        raise ConfigError(f"{name} is {value!r}; it is one of {', '.join(choices)}")


class DataError(DdlError, ValueError):
    """Data that is missing, or not what the task needs."""


class DeviceError(DdlError, RuntimeError):
    """A device or a strategy that is not there, or can no longer be set up."""


class AddressTaken(DdlError, RuntimeError):
    """The address of this process in its cluster is in use; the next start may get another."""

    exit_status = UNEXPECTED_STATUS


class ModelDirectoryError(DdlError, RuntimeError):
    """A model directory, or a checkpoint or file in it, that cannot be used or written."""


class TrainingInterrupted(DdlError):
    """Training stopped on a signal, after saving; the same command goes on from there."""

    exit_status = 75


class WorkerLost(DdlError, RuntimeError):
    """Another worker of the cluster did not join, died or stalls; all have to start again."""

    exit_status = 77


class TrainingDiverged(DdlError, ArithmeticError):
    """The loss or the gradients stopped being finite."""

    exit_status = 76
