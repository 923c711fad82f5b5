"""The words that a shell completes: commands, flags, values, kinds of files."""

import dataclasses
from typing import Literal

from absl import flags

from ddl.cli.flags import flags_of, help_of
from ddl.cli.subcommands import SUBCOMMANDS, load

Files = Literal["none", "config", "folder", "file"]

# The flags that name files; a flag of one command goes before that of all.
_FILES: dict[str, Files] = {
    "code": "folder",
    "code_a": "folder",
    "code_b": "folder",
    "gin_file": "config",
    "gin_search_path": "folder",
    "log_dir": "folder",
    "model_dir": "folder",
    "output": "folder",
    "pictures": "folder",
    "predictions": "file",
    "prompt_file": "file",
    "replay output": "file",
    "report output": "file",
    "sweep_dir": "folder",
}

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
# The commands that take paths: of configs and folders, or of folders alone.
TAKES_PATHS: dict[str, Files] = {"show": "config", "report": "folder", "compare": "folder"}
TAKES_PATHS |= {"replay": "folder", "bisect": "folder"}


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
        CommandWords(
            name,
            command.purpose,
            tuple(_words_of(name, flag) for flag in flags_of(load(name).FLAGS)),
        )
        for name, command in SUBCOMMANDS.items()
    ]


def _words_of(command: str, flag: flags.Flag) -> FlagWords:
    sentence = help_of(flag).partition(". ")[0].rstrip(".")
    if flag.boolean:
        return FlagWords(f"--{'no' if flag.default else ''}{flag.name}", sentence, False)
    values = tuple(getattr(flag.parser, "enum_values", ()))
    files = _FILES.get(f"{command} {flag.name}", _FILES.get(flag.name, "none"))
    return FlagWords(f"--{flag.name}", sentence, True, values, files)
