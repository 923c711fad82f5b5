"""Export of a trained model."""

import functools
import os
import tempfile
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from ddl.checkpoints.directory import sync
from ddl.errors import ConfigError, ModelDirectoryError


def export_model(
    model: keras.Model, directory: str | os.PathLike[str], signature: Any = None
) -> list[Path]:
    """Writes `model` as a .keras file and as a SavedModel with a serving signature.

    The weights are those that the model has at the call; `Trainer.evaluation_weights` gives it the
    averages.

    Args:
      model: A built model. Layers of ddl, as in `ddl.models.gpt`, need an `import ddl.layers` where
        the .keras file is loaded.
      directory: Folder for `model.keras` and `saved_model/`, which holds nothing else. An earlier
        export stays until the new one is complete and on disk. A kill leaves a folder
        `<directory>.partial-…`; between two renames it holds both exports. Two processes must not
        export to one folder at once.
      signature: Inputs of the SavedModel, as `keras.Model.export` takes them. None: those that
        Keras knows; of a subclassed model it knows the shapes, and takes all for floats.

    Returns:
      The paths of `model.keras` and `saved_model`.

    Raises:
      ConfigError: If Keras cannot tell the constructor arguments of a class of the model.
      ModelDirectoryError: If the export cannot be written, or would replace other files.
    """
    place = Path(os.path.realpath(directory))  # keep a link, and replace its target
    try:
        if place.is_file():
            raise NotADirectoryError(f"{place} is a file, not a directory")
        if others := {path.name for path in place.glob("*")} - {"model.keras", "saved_model"}:
            raise FileExistsError(f"it would replace {place}, which holds {min(others)}, too")
        place.parent.mkdir(parents=True, exist_ok=True)
        prefix = f"{place.name}.partial-"
        with tempfile.TemporaryDirectory(dir=place.parent, prefix=prefix) as folder:
            partial = Path(folder, place.name)
            partial.mkdir()
            model.save(partial / "model.keras")
            _export(model, partial / "saved_model", signature)
            for each, _, files in os.walk(partial):
                for name in (*files, "."):
                    sync(Path(each, name))
            if place.exists():
                os.rename(place, Path(folder, "replaced"))
            os.rename(partial, place)
        sync(place.parent)
    except NotImplementedError as error:
        raise ConfigError(
            "The export needs the constructor arguments of each class of the model, which its "
            f"get_config returns. Keras: {' '.join(str(error).split())[:200]}"
        ) from error
    except (OSError, tf.errors.OpError) as error:
        raise ModelDirectoryError(f"The export to {directory} failed: {error}.") from error
    return [place / "model.keras", place / "saved_model"]


def _export(model: keras.Model, path: Path, signature: Any) -> None:
    """Writes a SavedModel that infers: by default, layers such as RandomFlip train."""
    model.__call__ = functools.partial(model.__call__, training=False)
    try:
        model.export(str(path), verbose=False, input_signature=signature)
    finally:
        del model.__call__
