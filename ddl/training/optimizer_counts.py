"""The number of updates and the learning rate of each optimizer of a Trainer."""

from ddl.errors import ConfigError
from ddl.figures import LEARNING_RATE
from ddl.optimizers.checks import check_counts
from ddl.optimizers.groups import figure
from ddl.optimizers.learning_rate import learning_rate_at
from ddl.step.train_step import TrainStep


def check(update: TrainStep, step: int) -> None:
    """Checks that the optimizers belong to a step.

    An optimizer whose number of updates depends on a tensor (`Update.when`) is not checked.

    Args:
      update: The update, which has the optimizers.
      step: Number of updates of the Trainer.

    Raises:
      ConfigError: If an optimizer has made another number of updates.
    """
    for name, optimizer in update.optimizers.items():
        if (applies := update.plan.applied[name].times) is not None:
            check_counts(optimizer, max(step - update.plan.frozen_until(name), 0) * applies)


def learning_rate(update: TrainStep, step: int) -> float:
    """Returns the learning rate of the only optimizer; see `learning_rates`.

    Raises:
      ConfigError: If there are several optimizers.
    """
    rates = list(learning_rates(update, step).values())
    if len(rates) > 1:
        raise ConfigError(
            "trainer.learning_rate needs a Trainer with one optimizer, got "
            f"{', '.join(update.optimizers)}. Read trainer.learning_rates, a dict by name."
        )
    return rates[0]


def learning_rates(update: TrainStep, step: int) -> dict[str, float]:
    """Returns the learning rate of each optimizer's last update, by the name of its figure.

    Before any update, it is that of the first; of an optimizer that is still frozen, it is 0.

    Args:
      update: The update, which has the optimizers.
      step: Number of updates of the Trainer.
    """
    rates = {}
    for name, optimizer in update.optimizers.items():
        frozen_until = update.plan.frozen_until(name)
        in_step = update.plan.applied[name].times == 1
        made = step - frozen_until if in_step else int(optimizer.iterations.numpy())
        is_frozen = bool(frozen_until) and step <= frozen_until
        rate = 0.0 if is_frozen else learning_rate_at(optimizer, max(made - 1, 0))
        rates[figure(LEARNING_RATE, name)] = rate
    return rates
