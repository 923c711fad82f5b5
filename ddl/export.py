"""Writing a trained model for use elsewhere."""

import shutil
from pathlib import Path

import keras

from ddl.errors import ModelDirectoryError


def export_model(model: keras.Model, directory: Path) -> list[Path]:
    """Writes `model` as a .keras file and as a SavedModel with a serving signature.

    Args:
      model: A built model. Dropout and noise layers of ddl, which do nothing when a model serves,
        are written as Keras's, so that loading it needs no ddl.
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
        model = _of_keras_layers(model)
        model.save(partial / "model.keras")
        model.export(str(partial / "saved_model"), verbose=False)
        shutil.rmtree(directory, ignore_errors=True)
        partial.rename(directory)
    except OSError as error:
        raise ModelDirectoryError(f"the export to {directory} failed: {error}") from error
    return [directory / "model.keras", directory / "saved_model"]


def _of_keras_layers(model: keras.Model) -> keras.Model:
    """The same model, with Keras's layer in the place of each of ddl's that derives from one."""
    if all(_of_keras(layer) is None for layer in model._flatten_layers()):
        return model

    def clone(layer: keras.layers.Layer) -> keras.layers.Layer:
        keras_class = _of_keras(layer) or type(layer)
        return keras_class.from_config(layer.get_config())

    try:
        copy = keras.models.clone_model(model, clone_function=clone, recursive=True)
    except ValueError:  # A class of the user's own, which cannot be taken apart.
        return model
    copy.set_weights(model.get_weights())
    return copy


def _of_keras(layer: keras.layers.Layer) -> type[keras.layers.Layer] | None:
    keras_class = getattr(keras.layers, type(layer).__name__, None)
    is_ours = type(layer).__module__.startswith("ddl.layers.")
    return keras_class if is_ours and keras_class in type(layer).__mro__ else None
