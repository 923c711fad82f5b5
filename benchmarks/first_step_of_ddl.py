"""`ddl.main` with timestamps of each part, for benchmarks.first_step. Has the same flags."""

import atexit
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import ddl.main
import ddl.run.train
from ddl.training.pace import Pace
from ddl.training.trainer import Trainer

times: dict[str, float] = {}


def note(name: str) -> None:
    """Records the end of a part; only the first call counts."""
    times.setdefault(name, time.time())


def write() -> None:
    """Writes the recorded times in order."""
    with open(os.environ["FIRST_STEP_TIMES"], "w") as file:
        file.writelines(f"{name}={moment}\n" for name, moment in times.items())


def noting(function: Callable[..., Any], before: str = "", after: str = "") -> Callable[..., Any]:
    """Wraps a function to record the end of a part before or after it."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if before:
            note(before)
        result = function(*args, **kwargs)
        if after:
            note(after)
        return result

    return wrapped


loop = Pace.loop


@contextmanager
def noted_loop(pace: Pace) -> Iterator[Any]:
    """Runs `Pace.loop` and records its end."""
    with loop(pace) as timer:
        yield timer
    note("first loop")


Pace.loop = noted_loop  # type: ignore[method-assign]
Trainer.trace = noting(Trainer.trace, before="build", after="trace")  # type: ignore[method-assign]
ddl.run.train.run = noting(ddl.run.train.run, before="imports")
atexit.register(write)

if __name__ == "__main__":
    ddl.main.run()
