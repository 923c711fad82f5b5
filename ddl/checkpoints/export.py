"""Export of a trained model."""

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import keras
import tensorflow as tf

from ddl.checkpoints.durable_files import recover_folder, replace_folder
from ddl.errors import ConfigError, ModelDirectoryError
from ddl.output import open_itself


def export_model(model: keras.Model, directory: str | os.PathLike[str]) -> list[Path]:
    """Writes `model` as a .keras file and as a SavedModel with a serving signature.

    Args:
      model: A built model. Layers of ddl, as in `ddl.models.gpt`, need an `import ddl.layers` where
        the .keras file is loaded.
      directory: Folder for `model.keras` and `saved_model/`. An earlier export stays until the new
        one is complete and on disk. If the process is killed, one of the two remains whole. If
        the file system cannot exchange two names, a kill between two renames leaves the earlier
        export in `<directory>.replaced`; the next export moves it back first.

    Returns:
      The paths of `model.keras` and `saved_model`.

    Raises:
      ConfigError: If Keras cannot tell the constructor arguments of a class of the model.
      ModelDirectoryError: If the export cannot be written, `directory` is a file, or another
        process is exporting there.
    """
    directory = Path(directory)
    place = Path(os.path.realpath(directory))  # keep a link, and replace its target
    partial = place.with_name(place.name + ".partial")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        if place.exists() and not place.is_dir():
            raise ModelDirectoryError(
                f"The export to {directory} failed: {place} is a file, not a directory. Move it."
            )
        with _alone(place.with_name(place.name + ".lock")):
            recover_folder(partial, place)
            try:
                partial.mkdir()
                _save(model, partial / "model.keras")
                model.export(str(partial / "saved_model"), verbose=False)
                replace_folder(partial, place)
            finally:  # an incomplete export, or the replaced one
                shutil.rmtree(partial, ignore_errors=True)
    except BlockingIOError:
        raise ModelDirectoryError(
            f"Another process is exporting to {directory}. Wait until it ends, then export again."
        ) from None
    except (OSError, tf.errors.OpError) as error:
        raise ModelDirectoryError(f"The export to {directory} failed: {error}.") from error
    return [directory / "model.keras", directory / "saved_model"]


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Holds a lock file in the `with` block. Raises BlockingIOError if another process holds it."""
    with open(lock, "w", opener=open_itself) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:
            pass  # some network file systems have no locks
        if os.fstat(file.fileno()).st_nlink == 0:  # its holder has just removed the file
            raise BlockingIOError
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def _save(model: keras.Model, path: Path) -> None:
    """Writes the .keras file, which names each class of the model and its arguments."""
    try:
        model.save(path)
    except NotImplementedError as error:
        named = re.search(r"Object (\w+) was created", str(error))
        name = named[1] if named else type(model).__name__
        raise ConfigError(
            f"The export needs the constructor arguments of each class of the model, to write "
            f"them to {path.name}, but {name} has arguments and no get_config. Give {name} a "
            "method get_config that returns its arguments, such as {'width': self.width}, then "
            "export again. The checkpoints stay usable."
        ) from error
