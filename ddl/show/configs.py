"""Reading of the configs that `ddl show` is given: files, folders of runs, flags."""

import dataclasses
import os
from collections.abc import Sequence
from contextlib import suppress

from absl import flags

from ddl import config
from ddl.cli.loading import load_config, prepare
from ddl.config import registry
from ddl.config.explained.provenance import Provenance
from ddl.config.modules import import_module
from ddl.config.parsing import Reader
from ddl.config.values import Binding, Import, Key, with_full_selector
from ddl.errors import ConfigError
from ddl.output import say

_GIVEN, _USED = "config.gin", "operative_config.gin"


@dataclasses.dataclass(frozen=True)
class ReadConfig:
    """A config that was read.

    Attributes:
      name: Its path; for that of the flags, the flags.
      bindings: The effective bindings by key.
      imports: The modules that it imports.
      entries: The bindings with their histories.
    """

    name: str
    bindings: dict[Key, Binding]
    imports: Sequence[str]
    entries: Sequence[Provenance]


def read(path: str, values: flags.FlagValues, used: bool, has_notes: bool) -> ReadConfig:
    """Reads a config and checks it as a run does.

    Args:
      path: A config file, a folder of a run, or "" for the config of the flags.
      values: The parsed flags, as `load_config` takes them.
      used: Whether to read the used values of a run's folder.
      has_notes: Whether a config of a run that this version of ddl or the user's modules reject is
        read without checks, with a note.

    Raises:
      ConfigError: If the config is wrong, or a folder holds no run.
    """
    if not path:
        load_config(values)
        given = [*values["gin_file"].value, *(values["gin_param"].value or ())]
        return _loaded(" ".join(given))
    of_run = os.path.isdir(path)
    file = _file_of_run(path, used) if of_run else path
    params = [] if values["gin_file"].value else values["gin_param"].value or []
    search_path = values["gin_search_path"].value or ()
    # The saved config of a run has no unused bindings, but a macro that a module read.
    allowed = None if of_run else values["gin_allow_unused"].value
    with prepare():
        try:
            config.load([file], params, search_path, allowed)
        except ConfigError as error:
            if not (of_run and has_notes):
                raise
            say(f"{file} is compared without checks, since this version rejects it: {error}")
            return _unchecked(path, file, search_path)
    return _loaded(path)


def _file_of_run(folder: str, used: bool) -> str:
    """Returns the path of the config of a run.

    Raises:
      ConfigError: If there is none.
    """
    file = os.path.join(folder, _USED if used else _GIVEN)
    if os.path.isfile(file):
        return file
    found = sorted(os.listdir(folder)) if os.access(folder, os.R_OK | os.X_OK) else None
    content = "cannot be read" if found is None else "is empty" if not found else "has no such file"
    raise ConfigError(
        f"{folder} must be the folder of a run, with the file {os.path.basename(file)}, but it "
        f"{content}. Pass the --model_dir of a run that has begun, or a config file."
    )


def _loaded(name: str) -> ReadConfig:
    return ReadConfig(
        name, config.effective_bindings(), config.imported_modules(), config.provenance()
    )


def _unchecked(name: str, file: str, search_path: Sequence[str]) -> ReadConfig:
    """Reads a config whose names this version may not know."""
    statements = list(Reader(search_path).file(file))
    imports = [each for each in statements if isinstance(each, Import)]
    registry.register_all()
    for statement in imports:
        with suppress(ConfigError):  # the note says it
            import_module(statement)
    given = [with_full_selector(each) for each in statements if isinstance(each, Binding)]
    bindings = {binding.key: binding for binding in given}
    return ReadConfig(name, bindings, [statement.module for statement in imports], ())
