"""Loading of weights from a local file into a model."""

import os
import re
import warnings
import zipfile

import h5py
import keras

from ddl.errors import ConfigError

_FAILED = re.compile(r"<\w+ name=([^,>]+), built=")
_SHAPES = re.compile(r"variable\.shape=(\([^)]*\)), Received: value\.shape=(\([^)]*\))")


def load_weights(model: keras.Model, path: str | os.PathLike[str], parameter: str) -> None:
    """Loads all weights of a model from a file that holds them and no others.

    Args:
      model: A built model.
      path: A file of Keras: `.weights.h5`, `.keras`, or `.h5` of earlier versions.
      parameter: Name of the argument that gives the path, for errors.

    Raises:
      ConfigError: If the file is missing, is none of Keras, or holds the weights of another model.
        The error says which layers match. The model may then have some of the weights.
    """
    if not os.path.isfile(path):
        raise ConfigError(
            f"{parameter} must be the path of a local file of weights, but {path} does not exist. "
            "Correct the path; model.save_weights('NAME.weights.h5') writes such a file."
        )
    layers = [layer.name for layer in model.layers if layer.weights]
    try:
        with warnings.catch_warnings():
            # Keras warns of each list of layers that the file lacks, in hundreds of lines above the
            # error, which says the same.
            warnings.filterwarnings("ignore", message="Skipping nested container")
            model.load_weights(path)
    except ValueError as error:
        text = str(error)
        listed = text.partition("List of objects that could not be loaded")[2]
        failed = [name for name in dict.fromkeys(_FAILED.findall(listed)) if name in layers]
        if not failed:  # formats that are loaded layer by layer
            reason = text.strip().splitlines()[0]
        else:
            matched = [name for name in layers if name not in failed]
            reason = f"{_some(matched)} match, {_some(failed)} do not"
            if shapes := _SHAPES.search(text):
                first = _FAILED.search(text)
                where = f"the first, {first[1]!r}," if first else "one"
                reason += (
                    f"; {where} has shape {shapes[1]} in the model and {shapes[2]} in the file"
                )
        raise _other(path, parameter, model, layers, reason) from None
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise ConfigError(
            f"{parameter}: {path} is no readable file of Keras: {error}. Save the weights again by "
            "model.save_weights('name.weights.h5')."
        ) from None
    # Keras ignores what a file holds beyond the model's weights.
    held, taken = _arrays(path), len(model.variables)
    if held is not None and held > taken:
        reason = f"all of them match, but the file holds {held} arrays and the model takes {taken}"
        raise _other(path, parameter, model, layers, reason)


def _other(
    path: str | os.PathLike[str],
    parameter: str,
    model: keras.Model,
    layers: list[str],
    reason: str,
) -> ConfigError:
    return ConfigError(
        f"{parameter}: {path} holds the weights of another model than {model.name!r}, which "
        f"has {len(layers)} layers with weights: {reason}. Pass a file of the same architecture "
        "and number of classes, or start by WarmStart, which can leave layers out."
    )


def _some(names: list[str]) -> str:
    """Returns a count and the first names."""
    if not names:
        return "0"
    dots = ", …" if len(names) > 3 else ""
    return f"{len(names)} ({', '.join(names[:3])}{dots})"


def _arrays(path: str | os.PathLike[str]) -> int | None:
    """Returns the number of arrays in a file; None for formats whose layers Keras counts."""

    def count(file: h5py.File) -> int | None:
        if "layer_names" in file.attrs or "model_weights" in file:
            return None
        found: list[str] = []

        def visit(name: str, item: object) -> None:
            if isinstance(item, h5py.Dataset) and not name.startswith("optimizer"):
                found.append(name)

        file.visititems(visit)
        return len(found)

    if zipfile.is_zipfile(path):
        with (
            zipfile.ZipFile(path) as archive,
            archive.open("model.weights.h5") as inner,
            h5py.File(inner) as file,
        ):
            return count(file)
    if not h5py.is_hdf5(path):
        return None
    with h5py.File(path) as file:
        return count(file)
