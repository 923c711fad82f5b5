"""What a config can name: ddl's own functions and classes, and those of Keras.

This is the one place that knows how gin keeps its registry.
"""

import copy
import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import gin
from gin import config as gin_config

# ddl's own: "module:attribute", named in configs as ddl.<attribute>, or <attribute> for short. Its
# layers, which bear the names of Keras's, are named as ddl.layers.<attribute>.
OWN: tuple[str, ...] = (
    "ddl.batch_size:global_batch_size",
    "ddl.data:images",
    "ddl.data:synthetic_arrays",
    "ddl.learning_rate:LearningRate",
    "ddl.lengths:epochs_to_steps",
    "ddl.lengths:steps_after_warmup",
    "ddl.lengths:warmup_steps",
    "ddl.models:cnn",
    "ddl.models:mlp",
    "ddl.models:resnet",
    "ddl.noise_scale:GradientNoiseScale",
    "ddl.optimizers:FusedAdagrad",
    "ddl.optimizers:FusedAdam",
    "ddl.optimizers:FusedAdamW",
    "ddl.optimizers:FusedRMSprop",
    "ddl.optimizers:FusedSGD",
    "ddl.optimizers:LAMB",
    "ddl.optimizers:LARS",
    "ddl.optimizers:MomentumSGD",
    "ddl.optimizers:exclude_from_weight_decay",
    "ddl.plateau:ReduceOnPlateau",
    "ddl.precision:LossScale",
    "ddl.precision:set_numerics",
    "ddl.retention:Retention",
    "ddl.run_plan:RunPlan",
    "ddl.schedules:CosineWithRestarts",
    "ddl.schedules:OneCycle",
    "ddl.schedules:ReciprocalSquareRoot",
    "ddl.schedules:StepDecay",
    "ddl.tasks:Classification",
    "ddl.trainer:Trainer",
    "ddl.warm_start:WarmStart",
    "ddl.weight_average:ExponentialMovingAverage",
)

LAYERS = "ddl.layers"

# Left out: metrics, whose names are those of the losses; activations, which Keras takes by name
# ('relu'); and the base classes, which nobody can build anything from.
KERAS_MODULES = (
    "keras.optimizers",
    "keras.optimizers.schedules",
    "keras.losses",
    "keras.initializers",
    "keras.regularizers",
    "keras.constraints",
    "keras.layers",
)
KERAS_BASES = frozenset(
    {
        "Optimizer",
        "LearningRateSchedule",
        "Loss",
        "Initializer",
        "Regularizer",
        "Constraint",
        "Layer",
        "Wrapper",
    }
)


def register(item: Callable[..., Any], name: str | None = None, module: str = "ddl") -> None:
    """Makes a function or a class known to configs as `module.name`, `name` for short.

    The item itself is left as it is, and what is built from it through a config is a plain
    instance: bindings reach it only where a config refers to it. Registering it again is fine.

    Args:
      item: The function or class.
      name: Its name in configs; its own when not given.
      module: What tells it from another item of the same name.
    """
    name = name or item.__name__
    known = gin_config._REGISTRY.get(f"{module}.{name}")
    if known is None or known.wrapped is not item:
        gin.external_configurable(item, name=name, module=module)


@functools.cache
def register_all() -> None:
    """Registers ddl's own items and those of Keras, which imports Keras."""
    for path in OWN:
        module, _, attribute = path.partition(":")
        register(getattr(importlib.import_module(module), attribute))
    layers = importlib.import_module(LAYERS)
    for attribute in layers.__all__:
        register(getattr(layers, attribute), module=LAYERS)
    for module in KERAS_MODULES:
        for attribute, item in vars(importlib.import_module(module)).items():
            # Keras also exports its classes under older names; only their own is registered.
            is_alias = attribute != getattr(item, "__name__", None)
            if inspect.isclass(item) and not is_alias and attribute not in KERAS_BASES:
                register(item, module=module)


def matches(selector: str) -> list[Any]:
    """Returns the registered items that a name may mean: one unless unknown or ambiguous.

    Each has `wrapped` (the function or class), `wrapper` (what takes its arguments from the
    config), `selector` (its full name), `allowlist` and `denylist`.
    """
    return gin_config._REGISTRY.get_all_matches(selector)


def short_name(selector: str) -> str:
    """Returns the shortest name that means the item of this full name, and no other."""
    if not gin_config._REGISTRY.matching_selectors(selector):
        return selector
    return gin_config._REGISTRY.minimal_selector(selector)


def names() -> list[str]:
    """Returns the shortest and the full names of all that is registered, without gin's own."""
    full = [selector for selector, _ in gin_config._REGISTRY.items()]
    full = [selector for selector in full if not selector.startswith("gin.")]
    return [short_name(selector) for selector in full] + full


def is_broken(item: Any) -> bool:
    """Whether an item is a Keras layer or model that gin has changed in place.

    `@gin.configurable` replaces `__init__`, whose signature Keras reads and then cannot.
    """
    return item.wrapper is item.wrapped and any(
        base.__name__ == "Operation" and base.__module__.startswith("keras.")
        for base in getattr(item.wrapped, "__mro__", ())
    )


def calls() -> dict[tuple[str, str], dict[str, Any]]:
    """Returns what was called so far: (scope, selector) to the values that gin gave, or knew.

    That is the bound values and the literal defaults, less those that the caller passed itself.
    """
    with gin_config._OPERATIVE_CONFIG_LOCK:
        return {call: dict(values) for call, values in gin_config._OPERATIVE_CONFIG.items()}


class _Built:
    """A bound value whose references have been called: each call takes what they gave then.

    gin copies what is bound for a call, and by that calls the references in it; this is a copy
    made before. In texts it is still what was bound.
    """

    def __init__(self, bound: Any):
        self._bound = bound
        self._product = copy.deepcopy(bound)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._product

    def __repr__(self) -> str:
        return repr(self._bound)


def build_bound(selector: str, parameter: str) -> Any:
    """Returns what is bound for a parameter, built now for the calls to come; None if nothing is.

    Args:
      selector: The full name of what has the parameter.
      parameter: One that is bound outside of scopes.
    """
    bound = gin_config._CONFIG.get(("", selector), {})
    if parameter not in bound:
        return None
    if not isinstance(bound[parameter], _Built):
        bound[parameter] = _Built(bound[parameter])
    return copy.deepcopy(bound[parameter])
