"""Names of losses and optimizers in a step, and the model that a verb means."""

from collections.abc import Sequence
from typing import Any

from ddl.errors import ConfigError, check_takes, did_you_mean
from ddl.optimizers.groups import ONLY


def name_of_loss(task: Any, loss: Any, name: str | None) -> str:
    """Returns the name of a loss: the given one, or that of the function.

    Raises:
      ConfigError: If the loss is not a function, or has no name.
    """
    where = f"{type(task).__name__}.step"
    if not callable(loss):
        raise ConfigError(
            f"{where}: a loss must be a function of features and training that returns a "
            f"ddl.PerExample, such as self.per_example, got {loss!r:.80}. Pass the function "
            "without calling it."
        )
    name = getattr(loss, "__name__", None) if name is None else name
    if not isinstance(name, str) or not name.isidentifier():
        raise ConfigError(
            f"{where}: a loss, or the function of a mean or sum, needs a name of letters, digits "
            f"and underscores, got {name!r} for {loss!r:.80}. "
            'Pass name="…", or make it a method of the task.'
        )
    check_takes(f"{type(task).__name__}.{name}", loss, ("features",), ("training",))
    return name


def name_of_optimizer(task: Any, names: Sequence[str], name: str | None) -> str:
    """Returns the name of an optimizer; None means the only one.

    Raises:
      ConfigError: If there is no optimizer of this name, or no name although there are several.
    """
    where = f"{type(task).__name__}.step"
    if name in names:
        return str(name)
    if name is not None and not isinstance(name, str):
        raise ConfigError(
            f"{where}: optimizer must be the name of an optimizer, a text, got {name!r:.80}. The "
            "optimizers themselves belong to the Trainer: pass it a dict from name to optimizer."
        )
    if name is not None:
        known = "only one, without a name" if list(names) == [ONLY] else ", ".join(names)
        raise ConfigError(
            f"{where}: there is no optimizer {name!r}; the Trainer has {known}."
            f"{did_you_mean(name, names)} Pass a dict of optimizers to the Trainer to name them."
        )
    if len(names) > 1:
        raise ConfigError(
            f"{where}: the Trainer has the optimizers {', '.join(names)}. Name one of them, "
            f'such as optimizer="{names[0]}".'
        )
    return names[0]


def model_of(task: Any, given: Any) -> Any:
    """Returns the given model, or the task's `model`.

    Raises:
      ConfigError: If there is neither.
    """
    if given is not None:
        return given
    if not hasattr(task, "model"):
        name = type(task).__name__
        raise ConfigError(
            f"{name}.step: {name} has no `model`, so each call must name the model, layer or "
            "variables, such as update.minimize(loss, batch, self.generator)."
        )
    return task.model
