"""Checks of the losses across examples, before training."""

from collections.abc import Mapping

from ddl.errors import ConfigError
from ddl.step.across_examples.gathering import refusal
from ddl.step.objective import Objective
from ddl.step.verbs.plan import StepPlan


class AcrossMicrobatchError(ConfigError):
    """A loss gathers the rows of a microbatch, of which there are several."""


def check_gathers(plan: StepPlan, microbatches: int) -> None:
    """Checks what the losses and functions of a step gather.

    Args:
      plan: The plan of the step.
      microbatches: Number of microbatches of a global batch.

    Raises:
      AcrossMicrobatchError: If a loss would depend on the number of microbatches.
    """
    name = type(plan.task).__name__
    of_losses, of_means = _gathering(plan.losses), _gathering(plan.means)
    if microbatches > 1:
        for loss, objective in of_losses.items():
            if any(call.across == "microbatch" for call in objective.gathers):
                raise AcrossMicrobatchError(refusal(f"{name}.{loss}"))
        for mean in of_means:
            raise AcrossMicrobatchError(
                f"{name}.{mean}: with ACCUMULATION_STEPS > 1, the function of update.mean or "
                "update.sum must not call ddl.gather. Return it as a metric of a loss, or set "
                "ACCUMULATION_STEPS = 1."
            )


def _gathering(objectives: Mapping[str, Objective]) -> dict[str, Objective]:
    return {name: one for name, one in objectives.items() if one.gathers}
