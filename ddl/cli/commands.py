"""The common frame of the commands: flags, help, exit statuses."""

import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from absl import flags

from ddl.cli.arguments import asks_for_help, parse, with_aliases
from ddl.cli.flags import list_of_flags
from ddl.errors import UNEXPECTED_STATUS, ConfigError, DataError, DdlError, WorkerLost
from ddl.output import printable, protect_standard_streams, say

_Parsed = TypeVar("_Parsed")


def parse_command_line(
    name: str,
    documentation: str | None,
    values: flags.FlagValues,
    argv: Sequence[str] | None,
    check: Callable[[], _Parsed],
) -> _Parsed:
    """Parses a command line, or exits: with 0 after --help, with 1 after a wrong flag.

    Args:
      name: Name of the command, which begins each line of an error.
      documentation: Text of --help before the list of flags.
      values: The flags of the command, with a flag `gin_file`; they get their values here.
      argv: The program's name, then the arguments; None takes those of this process.
      check: Checks the parsed flags, and raises `flags.Error` for a wrong one.

    Returns:
      The result of `check`.
    """
    arguments = with_aliases(sys.argv if argv is None else argv)
    wants_help = asks_for_help(arguments)
    protect_standard_streams(name)
    if wants_help:
        print(f"{documentation}\nFlags:\n{list_of_flags(values)}")
        sys.exit(0)
    try:
        parse(values, arguments)
        if not values["gin_file"].value:
            raise flags.Error(
                "--gin_file is required. Pass a config, such as --gin_file=configs/digits_cnn.gin."
            )
        return check()
    except flags.Error as error:
        # `ddl` alone lists the commands; its flags are those of `ddl train`.
        own_help = f"{'ddl train' if name == 'ddl' else name} --help"
        say(f"{error}\nRun {own_help} for a list of all flags.")
        sys.exit(1)


@contextmanager
def exiting_on_errors() -> Iterator[None]:
    """Reports an error of the `with` block and exits with the status that the error calls for.

    The status is that of a DdlError, 130 for an interrupt, and `UNEXPECTED_STATUS` with a traceback
    for any other error.
    """
    try:
        yield
    except DdlError as error:
        say(_text_of(error))
        if isinstance(error, WorkerLost):
            # TensorFlow's own exit would wait for the lost worker.
            _leave(error.exit_status)
        sys.exit(error.exit_status)
    except KeyboardInterrupt:
        say("Interrupted.")
        sys.exit(130)
    except Exception:  # TensorFlow's own exit may wait for other workers
        sys.stderr.write(printable(traceback.format_exc()))
        _leave(UNEXPECTED_STATUS)


def _text_of(error: DdlError) -> str:
    """Returns the message of an error; with the places of the bindings that it mentions."""
    message = "\n".join([str(error), *getattr(error, "__notes__", ())])
    if not isinstance(error, (ConfigError, DataError)):
        return message
    from ddl import config  # the flags are checked before gin is imported

    return "\n".join([message, *config.places_mentioned(message)])


def _leave(status: int) -> None:
    """Ends the process without the exit handlers, such as TensorFlow's."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
