"""Writing a trained model for use elsewhere."""

import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from ddl import layers, optimizers
from ddl.errors import ModelDirectoryError
from ddl.layers.by_position import ByPosition
from ddl.optimizers.fused import Fused


def export_model(model: keras.Model, directory: Path) -> list[Path]:
    """Writes `model` as a .keras file and as a SavedModel with a serving signature.

    Args:
      model: A built model. Dropout and noise layers of ddl, which do nothing when a model serves,
        are written as Keras's, and so is a fused optimizer that it was compiled with, so that
        loading it needs no ddl.
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
        _name_classes_of_keras(partial / "model.keras")
        model.export(str(partial / "saved_model"), verbose=False)
        shutil.rmtree(directory, ignore_errors=True)
        partial.rename(directory)
    except (OSError, tf.errors.OpError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise ModelDirectoryError(f"the export to {directory} failed: {error}") from error
    return [directory / "model.keras", directory / "saved_model"]


def _name_classes_of_keras(path: Path) -> None:
    """Names in a .keras file, for each class of ddl that stands before one of Keras, that one.

    Both have the same config and the same variables.
    """
    rewritten = path.with_suffix(".rewritten")
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(rewritten, "w") as target:
        for item in source.infolist():
            content = source.read(item)
            if item.filename == "config.json":
                content = json.dumps(_renamed(json.loads(content))).encode()
            target.writestr(item, content)
    rewritten.replace(path)


def _renamed(config: Any) -> Any:
    if isinstance(config, list):
        return [_renamed(item) for item in config]
    if not isinstance(config, dict):
        return config
    config = {key: _renamed(value) for key, value in config.items()}
    module, _, name = str(config.get("registered_name", "")).partition(">")
    if module != "ddl":
        return config
    layer, optimizer = getattr(layers, name, None), getattr(optimizers, name, None)
    if isinstance(layer, type) and issubclass(layer, ByPosition):
        config |= {"module": "keras.layers", "registered_name": None}
    if isinstance(optimizer, type) and issubclass(optimizer, Fused):
        of_keras = name.removeprefix("Fused")
        config |= {
            "module": "keras.optimizers",
            "class_name": of_keras,
            "registered_name": None,
        }
    return config
