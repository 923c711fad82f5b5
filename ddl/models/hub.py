"""Models of keras-hub by name."""

import importlib
import inspect
import os
from collections.abc import Mapping
from typing import Any

import keras

from ddl.errors import ConfigError, did_you_mean, installing
from ddl.models.weights import load_weights


def keras_hub_model(
    name: str,
    *,
    backbone: Mapping[str, Any] | None = None,
    preset: str | None = None,
    weights: str | None = None,
    synchronized: bool = True,
    **arguments: Any,
) -> keras.Model:
    """Builds a model of keras-hub with a head, without its preprocessor.

    keras-hub builds the model from a backbone: from the arguments of the backbone's class, with
    initial weights, or from a folder that its `save_to_preset` wrote, with the weights there. A
    head that the folder lacks, such as one for another number of classes, gets initial weights.

    Args:
      name: Name of the class in `keras_hub.models`, such as "ResNetImageClassifier" or
        "GPT2CausalLM".
      backbone: Arguments of the backbone's class, such as those of `GPT2Backbone`.
      preset: Path of a local folder; give it or `backbone`. Nothing is downloaded.
      weights: Path of a local file of weights of the whole model; None loads none.
      synchronized: Whether batch normalization is over the microbatch of all replicas, and dropout
        draws by position. In the models of keras-hub both depend on the number of replicas.
      **arguments: Further arguments of the class, such as `num_classes`.

    Returns:
      A model from the inputs of the backbone, such as images or a dict of `token_ids` and
      `padding_mask`, both integers [batch, length], to logits.

    Raises:
      ConfigError: If keras-hub is not installed, has no such class, or rejects the arguments; if
        there is no such folder or file, or it holds another model.
    """
    hub = _keras_hub().models
    kinds: dict[str, Any] = {
        key: each
        for key, each in vars(hub).items()
        if isinstance(each, type)
        and issubclass(each, hub.Task)
        and getattr(each, "backbone_cls", None)
    }
    if name not in kinds:
        raise ConfigError(
            f"keras_hub_model.name must be a model with a head of keras_hub.models, got {name!r}."
            f"{did_you_mean(name, list(kinds))} There are {', '.join(sorted(kinds))}."
        )
    if (backbone is None) == (preset is None):
        raise ConfigError(
            "keras_hub_model takes either backbone, the arguments of "
            f"{kinds[name].backbone_cls.__name__}, or preset, the path of a local folder; got "
            f"{'neither' if preset is None else 'both'}."
        )
    if preset is not None and not os.path.isfile(os.path.join(preset, "config.json")):
        raise ConfigError(
            "keras_hub_model.preset must be a local folder with config.json, which save_to_preset "
            f"of a model of keras-hub writes, got {preset!r}. ddl downloads no presets: save one "
            "with keras-hub on a machine with a network, and pass its path."
        )
    arguments = {"preprocessor": None, "compile": False, **arguments}
    try:
        if preset is not None:
            _checked(kinds[name], arguments, "keras_hub_model")
            model = kinds[name].from_preset(preset, **arguments)
        else:
            of_backbone = {**(backbone or {})}
            inner = _built(kinds[name].backbone_cls, of_backbone, "keras_hub_model.backbone")
            model = _built(kinds[name], {"backbone": inner, **arguments}, "keras_hub_model")
    except (ValueError, TypeError, KeyError, OSError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"keras_hub_model.preset: keras-hub cannot build {name} from {preset}: {error} Name "
            "the class whose save_to_preset wrote the folder, and correct the arguments."
        ) from error
    if weights is not None:
        load_weights(model, weights, "keras_hub_model.weights")
    if synchronized:
        _make_same_on_all_replicas(model)
    return model


def _keras_hub() -> Any:
    try:
        return importlib.import_module("keras_hub")
    except ImportError as error:
        raise ConfigError(
            f"keras_hub_model needs keras-hub: {error}. {installing('keras-hub')}"
        ) from error


def _built(kind: Any, arguments: dict[str, Any], parameter: str) -> Any:
    """Builds an object of a class of keras-hub."""
    taken = _checked(kind, arguments, parameter)
    missing = [
        key
        for key, each in taken.items()
        if each.default is each.empty
        and each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
        and key not in arguments
    ]
    if missing:
        raise ConfigError(
            f"{parameter} lacks {', '.join(missing)} of keras_hub.models.{kind.__name__}, which "
            f"takes {_names(taken)}. Add it."
        )
    try:
        return kind(**arguments)
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{parameter}: keras_hub.models.{kind.__name__} rejects its arguments: {error} It "
            f"takes {_names(taken)}."
        ) from error


def _checked(
    kind: type, arguments: Mapping[str, Any], parameter: str
) -> Mapping[str, inspect.Parameter]:
    """Returns the parameters of a class; raises ConfigError for arguments that it does not name.

    The classes pass what they do not name on to keras.Model, which ignores it.
    """
    known: set[str] = {"compile", "dtype", "name", "trainable"}
    for each in inspect.getmro(kind):
        if each.__module__.startswith("keras_hub."):
            known |= {*inspect.signature(each).parameters}
    taken = inspect.signature(kind).parameters
    for key in arguments:
        if key not in known:
            raise ConfigError(
                f"{parameter} has {key!r}, but keras_hub.models.{kind.__name__} takes "
                f"{_names(taken)}.{did_you_mean(key, sorted(known))} Correct or remove it."
            )
    return taken


def _names(taken: Mapping[str, inspect.Parameter]) -> str:
    return ", ".join(key for key, each in taken.items() if each.kind is not each.VAR_KEYWORD)


def _make_same_on_all_replicas(model: keras.Model) -> None:
    """Makes normalizations of a model compute the same on any number of replicas."""
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.synchronized = True
