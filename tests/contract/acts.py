"""The callback `@act` for configs: after a step it does as a test or the environment asks."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import gin

AT: dict[int, Callable[[], object]] = {}
"""What `act` calls, by step."""

EVERY_STEP = (
    *("import tests.contract.acts", "RunPlan.callbacks = [@Every()]"),
    *("Every.steps = 1", "Every.function = @act"),
)
"""Bindings by which a run calls `act` after each step."""

KILLED_AT = "CONTRACT_TESTS_KILLED_AT"
"""The variable with the step at which a process kills itself, once a checkpoint is written."""
MODEL_DIR = "CONTRACT_TESTS_MODEL_DIR"
"""The variable with the directory of that process's run."""


@gin.register
def act(moment) -> None:
    if os.environ.get(KILLED_AT) == str(moment.step):
        while not any(Path(os.environ[MODEL_DIR], "checkpoints").glob("*.index")):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    AT.get(moment.step, int)()
