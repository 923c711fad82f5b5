"""The kinds of registered items: tasks, models, sources and so on."""

import inspect
import types
import typing
from collections.abc import Iterator
from typing import Any

from ddl.config.signatures import UNKNOWN, signature_of

KINDS: dict[str, str] = {
    "run": "the run: its length, batches, precision, checkpoints",
    "tasks": "what a model learns",
    "models": "models of tasks",
    "sources": "data to train and evaluate on",
    "optimizers": "optimizers, and what they apply to which weights",
    "schedules": "learning rates, their schedules and lengths, weights of losses",
    "losses": "losses of Keras",
    "metrics": "metrics of tasks",
    "callbacks": "functions that a run calls",
    "layers": "layers of ddl and Keras",
    "initializers": "initial values of weights",
    "regularizers": "penalties on weights",
    "constraints": "constraints on weights",
    "others": "items of your own modules of no other kind",
}
"""Each kind, with the phrase that describes it."""

# A base class of the item, or of what the function returns; the nearest base decides.
_OF_BASE = {
    "Source": "sources",
    "Model": "models",
    "BaseOptimizer": "optimizers",
    "Optimizer": "optimizers",
    "LearningRateSchedule": "schedules",
    "Loss": "losses",
    "Metric": "metrics",
    "Callback": "callbacks",
    "Layer": "layers",
    "Initializer": "initializers",
    "Regularizer": "regularizers",
    "Constraint": "constraints",
}

# The module of an item of ddl; the longest prefix decides, before any base class.
_OF_MODULE = {
    "ddl": "run",
    "ddl.callbacks": "callbacks",
    "ddl.data": "sources",
    "ddl.layers": "layers",
    "ddl.metrics": "metrics",
    "ddl.models": "models",
    "ddl.optimizers": "optimizers",
    "ddl.optimizers.learning_rate": "schedules",
    "ddl.optimizers.lengths": "schedules",
    "ddl.optimizers.loss_weight": "schedules",
    "ddl.optimizers.plateau": "schedules",
    "ddl.optimizers.schedules": "schedules",
    "ddl.tasks": "tasks",
}


def kind_of(item: Any, selector: str) -> str:
    """Returns the kind of a registered function or class, a key of `KINDS`.

    Args:
      item: The function or class.
      selector: Its full name.
    """
    module = item.__module__
    if module.partition(".")[0] == "ddl":
        prefixes = [each for each in _OF_MODULE if f"{module}.".startswith(f"{each}.")]
        return _OF_MODULE[max(prefixes, key=len)]
    for product in _products(signature_of(item).returns):
        for base in inspect.getmro(product):
            of_libraries = base.__module__.partition(".")[0] in ("ddl", "keras")
            if of_libraries and base.__name__ in _OF_BASE:
                return _OF_BASE[base.__name__]
        # A task needs no base class.
        if callable(getattr(product, "per_example", None)) or "step" in vars(product):
            return "tasks"
    # Such as keras.optimizers.OptimizerMap, which is not derived from Optimizer.
    module = selector.rpartition(".")[0].rpartition(".")[2]
    return module if selector.startswith("keras.") and module in KINDS else "others"


def _products(annotation: Any) -> Iterator[type]:
    """Yields the classes of an annotation: the members of a union, the class of a generic one."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        for member in typing.get_args(annotation):
            yield from _products(member)
    else:
        found = typing.get_origin(annotation) or annotation
        if inspect.isclass(found) and found is not UNKNOWN:
            yield found
