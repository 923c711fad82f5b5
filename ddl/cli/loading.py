"""Loading of the config that the flags name, for commands that set up no devices."""

import os
import sys

from absl import flags


def load_config(values: flags.FlagValues) -> None:
    """Loads the config of a command line. `prepare` comes first.

    Args:
      values: The parsed flags, with `gin_file`, `gin_param`, `gin_search_path` and
        `gin_allow_unused`.

    Raises:
      ConfigError: If the config is wrong.
    """
    from ddl import config

    config.load(
        values["gin_file"].value,
        values["gin_param"].value or (),
        values["gin_search_path"].value or (),
        values["gin_allow_unused"].value,
    )


def prepare() -> None:
    """Lets a config find the user's modules, and silences TensorFlow's start-up messages.

    Call it before TensorFlow is imported. A TF_CPP_MIN_LOG_LEVEL of the environment stays.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    # A config imports the user's own modules, from the current folder.
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
