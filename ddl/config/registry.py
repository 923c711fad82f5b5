"""Registry of the functions and classes that a config can name: ddl's own, Keras's and the user's.

Only this module accesses gin's private names.
"""

import copy
import functools
import importlib
import inspect
import re
from collections.abc import Iterable
from typing import Any

import gin
from gin import config as gin_config

from ddl.config.statements import MACRO, Binding, Key, complain, place
from ddl.errors import ConfigError, did_you_mean

# Modules whose public functions and classes a config may name as ddl.<name>, short <name>.
_PUBLIC = ("callbacks", "data", "layers", "metrics", "models", "optimizers", "tasks")
_OTHERS = (
    "ddl:ExponentialMovingAverage LossScale LossWeight Remat Retention Trainer WarmStart",
    "ddl.optimizers.learning_rate:LearningRate",
    "ddl.optimizers.lengths:epochs_to_steps steps_after_warmup warmup_steps",
    "ddl.optimizers.plateau:ReduceOnPlateau",
    "ddl.optimizers.schedules:CosineWithRestarts OneCycle ReciprocalSquareRoot StepDecay",
    "ddl.precision:set_numerics",
    "ddl.run.plan:RunPlan",
    "ddl.run.predicting.settings:Predictions",
    "ddl.run.trackers:MLflow WeightsAndBiases",
    "ddl.training.checks.batch_size:global_batch_size",
)
# Not metrics, whose names collide with those of the losses, nor activations, which Keras takes by
# name ('relu').
_KERAS = "optimizers optimizers.schedules losses initializers regularizers constraints layers"


@functools.cache
def register_all() -> None:
    """Registers ddl's own items and Keras's; imports Keras.

    The items themselves are not modified, and a config builds plain instances of them.
    """
    for module in (f"ddl.{part}" for part in _PUBLIC):
        # ddl's layers share their names with Keras's; configs name them ddl.layers.<name>.
        prefix = module if module == "ddl.layers" else "ddl"
        _register(module, importlib.import_module(module).__all__, prefix)
    for module, _, names in (other.partition(":") for other in _OTHERS):
        _register(module, names.split(), "ddl")
    for module in (f"keras.{part}" for part in _KERAS.split()):
        items = vars(importlib.import_module(module)).items()
        _register(module, [name for name, item in items if inspect.isclass(item)], module)


def _register(module: str, names: Iterable[str], prefix: str) -> None:
    for item in (getattr(importlib.import_module(module), name) for name in names):
        if inspect.isclass(item) or inspect.isfunction(item):
            gin.external_configurable(item, module=prefix)


def matches(selector: str) -> list[Any]:
    """Returns the registered items that match a name: one unless unknown or ambiguous.

    Each has `wrapped`, the function or class, and `selector`, its full name.
    """
    return gin_config._REGISTRY.get_all_matches(selector)


def full_name(selector: str) -> str:
    """Returns the full name for a selector; the selector itself if unknown or ambiguous."""
    found = matches(selector)
    return found[0].selector if len(found) == 1 else selector


def short_name(selector: str) -> str:
    """Returns the shortest unambiguous name for a full name; other names unchanged."""
    known = gin_config._REGISTRY
    return known.minimal_selector(selector) if selector in known else selector


def shown(key: Key) -> str:
    """Returns the left-hand side of a binding, with the shortest unambiguous name."""
    scope, selector, parameter = key
    name = f"{short_name(selector)}.{parameter}"
    return scope if selector == MACRO else f"{scope}/{name}" if scope else name


def line_of(binding: Binding) -> str:
    """Returns an indented line with the place of a binding, its name and its value."""
    return f"  {place(binding.location)}: {shown(binding[:3])} = {binding.value!r}"


def user_packages() -> set[str]:
    """Returns the packages of the registered items that are neither ddl's nor Keras's."""
    modules = [item.wrapped.__module__ for _, item in gin_config._REGISTRY.items()]
    packages = {module.partition(".")[0] for module in modules}
    return packages - {"ddl", "keras", "gin", "tensorflow", "builtins"}


def is_constant(name: str) -> bool:
    """Returns whether `%name` is a constant of gin's, such as a member of an Enum."""
    return bool(gin_config._CONSTANTS.matching_selectors(name))


def bind(binding: Binding) -> str:
    """Binds a parameter in gin's config.

    Returns:
      gin's complaint, with a suggestion, if a name is unknown or ambiguous, the parameter does not
      exist, or the value cannot be written to a config and read back; else "".
    """
    try:
        gin.bind_parameter(binding[:3], gin_config.parse_value(repr(binding.value)))
        return ""
    except SyntaxError:
        what = f"{binding.value!r} cannot be read back from a config. Use another value."
    except (ValueError, KeyError) as error:
        known = [short_name(selector) for selector, _ in gin_config._REGISTRY.items()]
        for item in matches(binding.selector):
            known += inspect.signature(item.wrapped).parameters
        what = str(error).partition("\n")[0].strip('"')
        *_, word = re.findall(r"'@?([\w./]+)(?:\(\))?'", what)
        what += did_you_mean(word, known, cutoff=0.6) or " Correct it, or import its module."
    return complain(binding.location, what)


def operative_values() -> dict[Key, Any]:
    """Returns the values that calls so far took from the config or from literal defaults."""
    with gin_config._OPERATIVE_CONFIG_LOCK:
        calls = gin_config._OPERATIVE_CONFIG.items()
        return {(*call, name): value for call, taken in calls for name, value in taken.items()}


class _Fixed:
    """A bound value that every call gets as it is: gin deep-copies a bound value for each call.

    Its repr is still that of the bound value, for the saved texts.
    """

    def __init__(self, product: Any, bound: Any):
        self._product, self._bound = product, bound

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if isinstance(self._product, ConfigError):
            raise self._product
        return self._product

    def __repr__(self) -> str:
        return repr(self._bound)


def withhold(name: str, error: ConfigError) -> None:
    """Makes reading a macro raise an error."""
    gin.bind_parameter((name, MACRO, "value"), _Fixed(error, None))


def build_bound(selector: str, parameter: str) -> Any:
    """Builds the value bound for a parameter outside of scopes, for reuse by later calls."""
    bound = gin_config._CONFIG.get(("", selector), {})
    if parameter in bound and not isinstance(bound[parameter], _Fixed):
        bound[parameter] = _Fixed(copy.deepcopy(bound[parameter]), bound[parameter])
    return copy.deepcopy(bound.get(parameter))
