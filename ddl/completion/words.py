"""The words that a shell completes: commands, flags, values, kinds of files."""

import dataclasses
from typing import Literal

from absl import flags

from ddl.cli.flags import flags_of, help_of
from ddl.cli.subcommands import SUBCOMMANDS, load

Files = Literal["none", "config", "folder"]

_CONFIGS = ("gin_file",)
_FOLDERS = ("model_dir", "gin_search_path", "log_dir", "output")

# The commands that take words which are no flags. The kinds of `ddl list` are written here, since
# the module that knows them imports TensorFlow; a test compares them.
POSITIONAL: dict[str, tuple[str, ...]] = {
    "list": (
        *("run", "tasks", "models", "sources", "optimizers", "schedules", "losses", "metrics"),
        *("callbacks", "layers", "initializers", "regularizers", "constraints", "others"),
        *("macros", "flags", "configs", "commands"),
    ),
    "completion": ("bash", "zsh", "fish"),
}
# The commands that take paths of configs and folders of runs.
TAKES_PATHS = ("show",)


@dataclasses.dataclass(frozen=True)
class FlagWords:
    """A flag of a command.

    Attributes:
      name: As it is typed, with -- and, for a bool that is true by default, with no.
      help: First sentence of its help.
      takes_value: Whether a value follows.
      values: The values, if they are known.
      files: Which files its value names.
    """

    name: str
    help: str
    takes_value: bool
    values: tuple[str, ...] = ()
    files: Files = "none"


@dataclasses.dataclass(frozen=True)
class CommandWords:
    """A subcommand.

    Attributes:
      name: Its name.
      purpose: Its line in `ddl --help`.
      flags: Its flags.
    """

    name: str
    purpose: str
    flags: tuple[FlagWords, ...]


def words_of_all_commands() -> list[CommandWords]:
    """Returns the words of each subcommand. Imports no TensorFlow."""
    return [
        CommandWords(name, command.purpose, tuple(map(_words_of, flags_of(load(name).FLAGS))))
        for name, command in SUBCOMMANDS.items()
    ]


def _words_of(flag: flags.Flag) -> FlagWords:
    sentence = help_of(flag).partition(". ")[0].rstrip(".")
    if flag.boolean:
        return FlagWords(f"--{'no' if flag.default else ''}{flag.name}", sentence, False)
    values = tuple(getattr(flag.parser, "enum_values", ()))
    files: Files = "none"
    if flag.name in _CONFIGS:
        files = "config"
    elif flag.name in _FOLDERS:
        files = "folder"
    return FlagWords(f"--{flag.name}", sentence, True, values, files)
