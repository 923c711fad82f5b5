"""The callback `@act` for configs: after a step it does as a test asks."""

from collections.abc import Callable

import gin

AT: dict[int, Callable[[], object]] = {}
"""What `act` calls, by step."""

EVERY_STEP = (
    *("import tests.contract.acts", "RunPlan.callbacks = [@Every()]"),
    *("Every.steps = 1", "Every.function = @act"),
)
"""Bindings by which a run calls `act` after each step."""


@gin.register
def act(event) -> None:
    AT.get(event.step, int)()
