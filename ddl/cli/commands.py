"""The common frame of the commands: parsing, help, exit statuses. Imports no TensorFlow."""

import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from absl import flags

from ddl.errors import UNEXPECTED_STATUS, ConfigError, DataError, DdlError, WorkerLost
from ddl.output import printable, protect_standard_streams, say

# Flags whose empty value would mean the working directory.
_PATHS = ("model_dir", "gin_file", "predictions")


def parse(
    values: flags.FlagValues, arguments: Sequence[str] | None, documentation: str | None
) -> None:
    """Parses a command line; after --help, prints the help and exits with status 0.

    Args:
      values: The flags, which get their values here.
      arguments: The program's name, then the arguments; None takes those of this process.
        --gin.NAME=VALUE means --gin_param=NAME=VALUE.
      documentation: Text of --help before the list of flags.

    Raises:
      flags.Error: If an argument is not a flag, a value is invalid, a path is empty, a
        single-valued flag is given twice, or --gin_file, which must be among the flags, is missing.
    """
    arguments = sys.argv if arguments is None else arguments
    if {"--help", "-help", "-h", "-?", "--helpfull"} & {*arguments}:
        print(f"{documentation}\nFlags:\n{values.get_help(include_special_flags=False)}")
        sys.exit(0)
    for name in values:
        # By default absl keeps the last value and ignores the earlier ones silently.
        values[name].allow_overwrite = isinstance(values[name], flags.MultiFlag)
    try:
        rest = values([_without_alias(argument) for argument in arguments])[1:]
    except flags.UnrecognizedFlagError as error:
        remedy = ". A config says what is computed: pass --gin_param='NAME = VALUE'."
        raise flags.Error(f"{error}{'' if 'Did you' in str(error) else remedy}") from None
    for name in _PATHS:
        if name in values and values[name].value in ("", [""]):
            raise flags.Error(
                f"--{name} must be a path, got an empty text. A variable of the shell may be unset."
            )
    if rest:
        raise flags.Error(f"'{rest[0]}' is not a flag. Flags begin with --: --gin_file=FILE.")
    if "gin_file" in values and not values.gin_file:
        raise flags.Error(
            "--gin_file is required. Pass a config, such as --gin_file=configs/digits_cnn.gin."
        )


def _without_alias(argument: str) -> str:
    name = argument.lstrip("-")
    is_alias = name != argument and name.startswith("gin.")
    return f"--gin_param={name.removeprefix('gin.')}" if is_alias else argument


@contextmanager
def exiting_on_errors(program: str) -> Iterator[None]:
    """Reports an error of the `with` block and exits with the status that the error calls for.

    The status is 1 for a wrong flag, that of a DdlError, 130 for an interrupt, and
    `UNEXPECTED_STATUS` with a traceback for any other error.

    Args:
      program: Name of the command, which begins each error.
    """
    protect_standard_streams(program)
    try:
        yield
    except flags.Error as error:
        say(f"{error}\nRun the command with --help for a list of all flags.")
        sys.exit(DdlError.exit_status)
    except DdlError as error:
        say(_text_of(error))
        if isinstance(error, WorkerLost):
            leave(error.exit_status)  # TensorFlow's own exit would wait for the lost worker
        sys.exit(error.exit_status)
    except KeyboardInterrupt:
        say("Interrupted.")
        sys.exit(130)
    except Exception:  # TensorFlow's own exit may wait for other workers
        sys.stderr.write(printable(traceback.format_exc()))
        leave(UNEXPECTED_STATUS)


def _text_of(error: DdlError) -> str:
    """Returns the message of an error; with the places of the bindings that it mentions."""
    message = "\n".join([str(error), *getattr(error, "__notes__", ())])
    if not isinstance(error, (ConfigError, DataError)):
        return message
    from ddl import config  # the flags are checked before gin is imported

    return "\n".join([message, *config.places_mentioned(message)])


def leave(status: int) -> NoReturn:
    """Ends the process without the exit handlers, such as TensorFlow's."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
