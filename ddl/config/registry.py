"""Registry of the functions and classes that a config can name: ddl's own and Keras's.

Only this module accesses gin's private registry.
"""

import copy
import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import gin
from gin import config as gin_config

# ddl's own items as "module:attribute". Configs name them ddl.<attribute>, short <attribute>.
# ddl's layers share their names with Keras's; configs name them ddl.layers.<attribute>.
OWN: tuple[str, ...] = (
    "ddl.training.checks.batch_size:global_batch_size",
    "ddl.callbacks:AfterEvaluation",
    "ddl.callbacks:AfterSave",
    "ddl.callbacks:Every",
    "ddl.data:array_records",
    "ddl.data:concatenate",
    "ddl.data:digits",
    "ddl.data:image_folder",
    "ddl.data:images",
    "ddl.data:k_fold",
    "ddl.data:mix",
    "ddl.data:packed",
    "ddl.data:penguins",
    "ddl.data:play",
    "ddl.data:shapes",
    "ddl.data:stream",
    "ddl.data:subset",
    "ddl.data:synthetic",
    "ddl.data:table",
    "ddl.data:tf_records",
    "ddl.data:token_lines",
    "ddl.data:tokens",
    "ddl.optimizers.learning_rate:LearningRate",
    "ddl.optimizers.loss_weight:LossWeight",
    "ddl.optimizers.lengths:epochs_to_steps",
    "ddl.optimizers.lengths:steps_after_warmup",
    "ddl.optimizers.lengths:warmup_steps",
    "ddl.metrics:ConfusionCounts",
    "ddl.metrics:FunctionOfMean",
    "ddl.metrics:KerasMetric",
    "ddl.metrics:OfAllOutputs",
    "ddl.metrics:Perplexity",
    "ddl.models:bert",
    "ddl.models:cnn",
    "ddl.models:gpt",
    "ddl.models:keras_application",
    "ddl.models:keras_hub_model",
    "ddl.models:load_exported",
    "ddl.models:mlp",
    "ddl.models:resnet",
    "ddl.models:table_mlp",
    "ddl.models:unet",
    "ddl.models:vit",
    "ddl.step.remat:Remat",
    "ddl.optimizers:FusedAdagrad",
    "ddl.optimizers:FusedAdam",
    "ddl.optimizers:FusedAdamW",
    "ddl.optimizers:FusedRMSprop",
    "ddl.optimizers:FusedSGD",
    "ddl.optimizers:Group",
    "ddl.optimizers:LAMB",
    "ddl.optimizers:LARS",
    "ddl.optimizers:MomentumSGD",
    "ddl.optimizers:ParameterGroups",
    "ddl.optimizers:exclude_from_weight_decay",
    "ddl.optimizers.plateau:ReduceOnPlateau",
    "ddl.precision:LossScale",
    "ddl.precision:set_numerics",
    "ddl.checkpoints.retention:Retention",
    "ddl.callbacks.early_stopping:EarlyStopping",
    "ddl.run.plan:RunPlan",
    "ddl.run.predicting.settings:Predictions",
    "ddl.run.trackers:MLflow",
    "ddl.run.trackers:WeightsAndBiases",
    "ddl.optimizers.schedules:CosineWithRestarts",
    "ddl.optimizers.schedules:OneCycle",
    "ddl.optimizers.schedules:ReciprocalSquareRoot",
    "ddl.optimizers.schedules:StepDecay",
    "ddl.tasks:Classification",
    "ddl.tasks:Distillation",
    "ddl.tasks:LanguageModel",
    "ddl.tasks:MaskedLanguageModel",
    "ddl.tasks:MultiLabel",
    "ddl.tasks:Regression",
    "ddl.tasks:Segmentation",
    "ddl.tasks:Supervised",
    "ddl.training.trainer:Trainer",
    "ddl.checkpoints.warm_start:WarmStart",
    "ddl.step.weight_average:ExponentialMovingAverage",
)

LAYERS = "ddl.layers"

# Not registered: metrics, whose names collide with those of the losses; activations, which Keras
# takes by name ('relu'); and abstract base classes.
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
    """Registers a function or class for configs as `module.name`, `name` for short.

    The item itself is not modified, and a config builds plain instances of it. Bindings apply only
    where a config refers to the item. Repeated registration has no effect.

    Args:
      item: The function or class.
      name: Its name in configs; None takes its own name.
      module: Prefix that distinguishes items of the same name.
    """
    name = name or item.__name__
    known = gin_config._REGISTRY.get(f"{module}.{name}")
    if known is None or known.wrapped is not item:
        gin.external_configurable(item, name=name, module=module)


@functools.cache
def register_all() -> None:
    """Registers ddl's own items and Keras's; imports Keras."""
    for path in OWN:
        module, _, attribute = path.partition(":")
        register(getattr(importlib.import_module(module), attribute))
    layers = importlib.import_module(LAYERS)
    for attribute in layers.__all__:
        register(getattr(layers, attribute), module=LAYERS)
    for module in KERAS_MODULES:
        for attribute, item in vars(importlib.import_module(module)).items():
            # Keras also exports classes under older names; only their own names are registered.
            is_alias = attribute != getattr(item, "__name__", None)
            if inspect.isclass(item) and not is_alias and attribute not in KERAS_BASES:
                register(item, module=module)
    _prefer_items_of_users()


def _prefer_items_of_users() -> None:
    """Makes a name mean the user's item where ddl or Keras has one of the same name, too.

    Otherwise a name that a later version of ddl adds would make a config ambiguous.
    """
    registry = gin_config._REGISTRY
    find = registry.matching_selectors

    def of_users_first(partial_selector: str) -> list[str]:
        found = find(partial_selector)
        own = [each for each in found if not each.startswith(("ddl.", "keras."))]
        return own if len(own) == 1 else found

    registry.matching_selectors = of_users_first


def matches(selector: str) -> list[Any]:
    """Returns the registered items that match a name: one unless unknown or ambiguous.

    Each item has `wrapped` (the function or class), `wrapper` (the version that takes arguments
    from the config), `selector` (its full name), `allowlist` and `denylist`.
    """
    return gin_config._REGISTRY.get_all_matches(selector)


def items() -> list[Any]:
    """Returns all registered items without gin's own; `matches` says what each has."""
    return [item for selector, item in gin_config._REGISTRY.items() if selector[:4] != "gin."]


def short_name(selector: str) -> str:
    """Returns the shortest unambiguous name for a full name; other names unchanged."""
    if selector not in gin_config._REGISTRY:
        return selector
    return gin_config._REGISTRY.minimal_selector(selector)


def names() -> list[str]:
    """Returns the shortest and the full names of all registered items, without gin's own."""
    full = [selector for selector, _ in gin_config._REGISTRY.items()]
    full = [selector for selector in full if not selector.startswith("gin.")]
    return [short_name(selector) for selector in full] + full


def user_packages() -> set[str]:
    """Returns the packages of the registered items that are neither ddl's nor Keras's."""
    modules = [item.wrapped.__module__ for _, item in gin_config._REGISTRY.items()]
    packages = {module.partition(".")[0] for module in modules}
    return packages - {"ddl", "keras", "gin", "tensorflow", "builtins"}


def is_broken(item: Any) -> bool:
    """Returns whether an item is a Keras layer or model that gin has modified in place.

    `@gin.configurable` replaces `__init__`, whose signature Keras then cannot read.
    """
    return item.wrapper is item.wrapped and any(
        base.__name__ == "Operation" and base.__module__.startswith("keras.")
        for base in getattr(item.wrapped, "__mro__", ())
    )


def calls() -> dict[tuple[str, str], dict[str, Any]]:
    """Returns the calls so far: (scope, selector) to the values that gin supplied or recorded.

    The values are bound values and literal defaults, without arguments that the caller passed.
    """
    with gin_config._OPERATIVE_CONFIG_LOCK:
        return {call: dict(values) for call, values in gin_config._OPERATIVE_CONFIG.items()}


class _Built:
    """A bound value whose references are already called: every call takes the same result.

    gin deep-copies a bound value for each call, and the copy calls its references. This class
    makes that copy once. Its repr is still that of the bound value, for the saved texts.
    """

    def __init__(self, bound: Any):
        self._bound = bound
        self.product = copy.deepcopy(bound)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.product

    def __repr__(self) -> str:
        return repr(self._bound)


def build_bound(selector: str, parameter: str) -> Any:
    """Builds the value bound for a parameter, for reuse by later calls; None if unbound.

    Args:
      selector: Full name of the item.
      parameter: A parameter of the item; only bindings outside of scopes count.
    """
    bound = gin_config._CONFIG.get(("", selector), {})
    if parameter not in bound:
        return None
    if not isinstance(bound[parameter], _Built):
        bound[parameter] = _Built(bound[parameter])
    return copy.deepcopy(bound[parameter])
