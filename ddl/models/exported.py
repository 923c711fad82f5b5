"""Models that were exported or saved."""

import os

import keras

import ddl.layers  # noqa: F401 (registers the layers that a file may name)
from ddl.errors import ConfigError


def load_exported(path: str | os.PathLike[str]) -> keras.Model:
    """Loads the `model.keras` of an export, with its weights, such as a teacher.

    Args:
      path: Path of the file; see `--mode=export`.

    Raises:
      ConfigError: If there is no such file, or Keras cannot load it.
    """
    if not os.path.isfile(path):
        raise ConfigError(
            f"load_exported.path must be a .keras file, but {path} does not exist. Export the run "
            "with --mode=export, which writes export/model.keras into its directory."
        )
    try:
        return keras.models.load_model(path, compile=False)
    except (ValueError, TypeError, OSError, KeyError) as error:
        raise ConfigError(
            f"{path} could not be loaded: {error} Import the module that defines its layers in the "
            "config, or save the model again."
        ) from error
