"""Writing a trained model for use elsewhere."""

import shutil
from pathlib import Path

import keras

from ddl.errors import ModelDirectoryError


def export_model(model: keras.Model, directory: Path) -> list[Path]:
    """Writes `model` as a .keras file and as a SavedModel with a serving signature.

    Args:
      model: A built model.
      directory: Gets `model.keras` and `saved_model/`. What an earlier export left there stays
        until the new one is complete.

    Returns:
      The two paths.

    Raises:
      ModelDirectoryError: If they cannot be written.
    """
    partial = directory.with_name(directory.name + ".partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        model.save(partial / "model.keras")
        model.export(str(partial / "saved_model"), verbose=False)
        shutil.rmtree(directory, ignore_errors=True)
        partial.rename(directory)
    except OSError as error:
        raise ModelDirectoryError(f"the export to {directory} failed: {error}") from error
    return [directory / "model.keras", directory / "saved_model"]
