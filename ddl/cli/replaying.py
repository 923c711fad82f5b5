"""The flags of the commands that replay runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from ddl.cli.flags import share

_OF_CONFIG = ("gin_param", "gin_bindings", "gin_search_path")
_OF_DEVICES = (
    *("strategy", "num_virtual_devices", "gpus", "virtual_gpu_memory", "memory_growth"),
    *("deterministic_ops", "tf32", "jit_compile", "cross_device_ops", "num_packs"),
    *("bytes_per_pack", "collectives", "data_on_device", "shard_optimizer_state"),
    "shard_gradients",
)


def define_replay_flags(values: flags.FlagValues) -> None:
    """Defines the flags that choose devices and change the config of a run that is replayed."""
    share(values, (*_OF_CONFIG, *_OF_DEVICES))


def given_flags(values: flags.FlagValues) -> list[str]:
    """Returns these flags, as far as they are given, as arguments for another process."""
    given = []
    for name in ("gin_param", "gin_search_path", *_OF_DEVICES):
        if values[name].present or (name == "gin_param" and values[name].value):
            value = values[name].value
            texts = value if isinstance(value, list) else [value]
            given += [f"--{name}={text}" for text in texts]
    return given


def chosen_devices(values: flags.FlagValues) -> dict[str, Any]:
    """Returns the values of the flags on devices that are given, by name."""
    return {name: values[name].value for name in _OF_DEVICES if values[name].present}


def folder_of_code(name: str, value: str | None) -> Path | None:
    """Returns the folder that a flag names for the user's modules; None without one.

    Raises:
      flags.Error: If it is no folder.
    """
    if value is None:
        return None
    if not Path(value).is_dir():
        raise flags.Error(f"--{name} must be a folder with the modules of a run, got {value}.")
    return Path(value)


def directories(paths: Sequence[str], count: int, command: str, example: str) -> list[Path]:
    """Returns the directories of runs that a command is given.

    Raises:
      flags.Error: If they are not as many.
    """
    if len(paths) != count:
        what = "the directory of one run" if count == 1 else f"the directories of {count} runs"
        raise flags.Error(f"{command} takes {what}, got {len(paths)}. Write {example}.")
    return [Path(path) for path in paths]
