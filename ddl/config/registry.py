"""gin's registry of what a config can name, ddl's own, Keras's and the user's, and its calls.

Only this module accesses gin's private names and reads its messages.
"""

import copy
import functools
import importlib
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from inspect import getfullargspec, isclass, isfunction, signature
from typing import Any

from gin import config as gin_config

from ddl.config.statements import MACRO, Binding, Import, Key, complain, nearest, place, source
from ddl.errors import ConfigError, DdlError, attributing_errors, did_you_mean, message_of, place_of

# Modules whose public names a config may use: those of ddl as ddl.<name>, short <name>, but its
# layers, which share their names with Keras's, as ddl.layers.<name>. Keras's metrics are not among
# them, whose names collide with those of the losses, nor activations, which Keras takes by name.
_PUBLIC = "ddl.data ddl.layers ddl.metrics ddl.models ddl.optimizers ddl.tasks"
_KERAS = "applications optimizers optimizers.schedules losses initializers regularizers constraints"
_OTHERS = (
    "ddl:AfterEvaluation AfterSave EarlyStopping Every",
    "ddl:ExponentialMovingAverage LossScale LossWeight Retention Trainer WarmStart",
    "ddl.optimizers.schedules:epochs_to_steps steps_after_warmup total_steps warmup_steps",
    "ddl.precision:set_numerics",
    "ddl.run.plan:RunPlan global_batch_size steps_per_epoch",
    "ddl.run.predicting:Predictions",
    "ddl.run.trackers:MLflow WeightsAndBiases",
)
_KNOWN = gin_config._REGISTRY
# Text that gin appends to an error at each call it passes, the innermost call first.
_IN_CALL = re.compile(r"\n  In call to configurable '(.+?)' \(.+?\)(?: in scope '(.+)')?(?:\n|$)")


def register(given: Sequence[Binding] | None = None) -> None:
    """Registers items of ddl, of Keras, and of keras-hub if the config has imported it.

    The items themselves are not modified, and a config builds plain instances of them.

    Args:
      given: The bindings of a config. Registered is what a word in them may mean, and what makes a
        name ambiguous; for all items gin would need 0.3 s. None registers all.
    """
    words = {*re.findall(r"\w+", f"{given} {[*dict(_KNOWN.items())]}")}
    of_keras = [f"keras.{part}" for part in (*_KERAS.split(), "layers")]
    of_keras += ["keras_hub.models"] * ("keras_hub" in sys.modules)  # its import takes seconds
    for one in (*_OTHERS, *_PUBLIC.split(), *of_keras):
        name, _, chosen = one.partition(":")
        module = importlib.import_module(name)
        # Presets share their last name, and all are registered so that none becomes ambiguous.
        takes_all = chosen or given is None or name == "keras_hub.models"
        for each in chosen.split() or getattr(module, "__all__", dir(module)):
            # gin goes by __name__, which may be another.
            if takes_all or words & {each, getattr(getattr(module, each), "__name__", each)}:
                _register(name, name if name in ("ddl.layers", *of_keras) else "ddl", each)


@functools.cache
def _register(module: str, prefix: str, name: str) -> None:
    """Registers a class, or a function that makes something, under a prefix."""
    item = getattr(sys.modules[module], name)
    if hasattr(item, "from_preset"):
        gin_config.external_configurable(item.from_preset, module=f"{prefix}.{name}")
    if isclass(item) or (isfunction(item) and prefix in ("ddl", "keras.applications")):
        gin_config.external_configurable(item, module=prefix, allowlist=_parameters(item))


def _parameters(item: Any) -> list[str] | None:
    """Returns what a class with **kwargs and its bases name; gin itself would bind any name."""
    if getfullargspec(item).varkw is None:
        return None
    of_each = [getfullargspec(x.__init__) for x in getattr(item, "__mro__", [item])[:-1]]
    return [name for spec in of_each for name in (*spec.args[1:], *spec.kwonlyargs)]


def import_module(statement: Import) -> str:
    """Imports the module of an `import` line, which may lie beside the config; returns its name.

    Raises:
      ConfigError: If it cannot be imported, with the line and the place in the user's code.
    """
    # As the last; its functions may import others later.
    sys.path.extend({os.path.dirname(os.path.abspath(statement.location.filename))} - {*sys.path})
    try:
        with attributing_errors():
            return importlib.import_module(statement.module).__name__
    except (ImportError, DdlError) as error:
        what = f"Cannot import {statement.module}: {error}. Correct it, or its place or PYTHONPATH."
        raise ConfigError(complain(statement.location, what)) from error


def matches(selector: str) -> list[Any]:
    """Returns the registered items that match a name: one unless unknown or ambiguous.

    Each has `wrapped`, the function or class, and `selector`, its full name.
    """
    return _KNOWN.get_all_matches(selector)


def full_name(selector: str) -> str:
    """Returns the full name for a selector; the selector itself if unknown or ambiguous."""
    found = matches(selector)
    return found[0].selector if len(found) == 1 else selector


def short_name(selector: str) -> str:
    """Returns the shortest unambiguous name for a full name; other names unchanged."""
    return _KNOWN.minimal_selector(selector) if selector in _KNOWN else selector


def shown(key: Key) -> str:
    """Returns the left-hand side of a binding, with the shortest unambiguous name."""
    scope, selector, parameter = key
    name = f"{scope}/" * bool(scope) + f"{short_name(selector)}.{parameter}"
    return scope if selector == MACRO else name


def line_of(binding: Binding) -> str:
    """Returns an indented line with the place of a binding, its name and its value."""
    return f"  {place(binding.location)}: {shown(binding[:3])} = {binding.value!r}"


def user_packages() -> set[str]:
    """Returns the packages of the registered items that are neither ddl's nor of Keras."""
    packages = [x.wrapped.__module__.partition(".")[0] for _, x in _KNOWN.items()]
    return {*packages} - {"ddl", "keras", "keras_hub", "gin", "tensorflow", "builtins"}


def is_constant(name: str) -> bool:
    """Returns whether `%name` is a constant of gin's, such as a member of an Enum."""
    return bool(gin_config._CONSTANTS.matching_selectors(name))


def bind(one: Binding) -> str:
    """Binds a parameter in gin's config.

    Returns:
      gin's complaint, with a suggestion, if a name is unknown or ambiguous, the parameter does not
      exist, or the value cannot be written to a config and read back; else "".
    """
    try:
        gin_config.bind_parameter(one[:3], gin_config.parse_value(repr(one.value)))
        return ""
    except SyntaxError:
        return complain(one.location, f"{one.value!r} cannot be read back. Use another value.")
    except (ValueError, KeyError) as error:
        what = str(error).partition("\n")[0].strip('"')
        register()  # all, for the suggestion
        known = [short_name(selector) for selector, _ in _KNOWN.items()]
        *_, word = re.findall(r"'@?([\w./]+)(?:\(\))?'", what)
        if word == one.arg_name and (found := matches(one.selector)):
            # A subclass's list repeats those of its base.
            known = [*dict.fromkeys(found[0].allowlist or signature(found[0].wrapped).parameters)]
            what = f"{one.selector} has no parameter {word!r}, only {', '.join(known)}."
        hint = did_you_mean(word, known, cutoff=0.6) or " Correct it, or import its module."
        return complain(one.location, f"{what}{hint}")


def operative_values() -> dict[Key, Any]:
    """Returns the values that calls so far took from the config or from literal defaults."""
    calls = list(gin_config._OPERATIVE_CONFIG.items())  # callbacks may call others meanwhile
    return {(*call, name): value for call, taken in calls for name, value in taken.items()}


class _Fixed:
    """A bound value that every call gets as it is: gin deep-copies a bound value for each call.

    A ConfigError is raised instead. The repr is that of the bound value, for the saved texts.
    """

    def __init__(self, product: Any, bound: Any):
        self._product, self._bound = product, bound

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if isinstance(self._product, ConfigError):
            raise self._product
        return self._product

    def __repr__(self) -> str:
        return repr(self._bound)


def build_bound(name: str, parameter: str, convert: Callable[[Any], Any] | None) -> Any:
    """Builds the value bound for a parameter outside of scopes, for reuse by later calls."""
    bound = gin_config._CONFIG.get(("", full_name(name)), {})
    if parameter in bound and not isinstance(value := bound[parameter], _Fixed):
        what = f"{name}.{parameter} is needed to compute itself. Write a number instead."
        bound[parameter] = _Fixed(ConfigError(what), value)
        built = copy.deepcopy(value)
        bound[parameter] = _Fixed(convert(built) if convert and built is not None else built, value)
    return copy.deepcopy(bound.get(parameter))


def calling(build: Callable[[], Any], name: str, bindings: Mapping[Key, Binding]) -> Any:
    """Returns the result of `build`, and adds the call and its bindings to errors.

    Args:
      build: Function without arguments that calls an item through gin.
      name: Name of the item that is built, for errors.
      bindings: The bindings of the config, for errors.

    Raises:
      DdlError: An error of ddl from within the call, with a note that names the call.
      ConfigError: If a call raises TypeError, ValueError or RecursionError.
    """
    try:
        return build()
    except (DdlError, TypeError, ValueError, RecursionError) as error:
        cause: BaseException = error
        while cause.__context__ and _IN_CALL.search(str(cause)):  # gin's wrappers
            cause = cause.__context__
        call = _IN_CALL.search(str(error))
        item, scope = (call[1], call[2] or "") if call else name.rpartition("/")[::-2]
        if isinstance(cause, DdlError):
            where = f"{scope}/{item}" if scope else item
            if where != name and "\n  in call to" not in str(cause):
                cause.args = (f"{cause}\n  in call to {where}",)
            raise cause.with_traceback(error.__traceback__) from cause.__cause__
        keys = [k for k in bindings if k[1] == full_name(item) and nearest((scope, *k[1:]), [k])]
        own = [bindings[key] for key in keys[-6:]]  # the last ones are the user's
        lines = dict.fromkeys(line_of(x) for one in own for x in (one, source(one, bindings)))
        at = place_of(cause, user_packages())
        what = f"{item} cannot be built; correct or add its bindings: {message_of(cause)}"
        raise ConfigError("\n".join([what, *lines, *([at.note] if at else [])])) from cause
