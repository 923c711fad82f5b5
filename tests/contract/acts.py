"""The callback `@act` for configs: after a step it does as a test or the environment asks."""

import os
import signal
from collections.abc import Callable

import gin

AT: dict[int, Callable[[], object]] = {}
"""What `act` calls, by step."""

EVERY_STEP = (
    *("import tests.contract.acts", "RunPlan.callbacks = [@Every()]"),
    *("Every.steps = 1", "Every.function = @act"),
)
"""Bindings by which a run calls `act` after each step."""

KILLED_AT = "CONTRACT_TESTS_KILLED_AT"
"""The variable with the step at which a process kills itself."""


@gin.register
def act(moment) -> None:
    if os.environ.get(KILLED_AT) == str(moment.step):
        os.kill(os.getpid(), signal.SIGKILL)
    AT.get(moment.step, int)()
