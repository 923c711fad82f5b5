"""`ddl.main`, noting for benchmarks.first_step when each part ends. Takes its flags."""

import atexit
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ddl.main
from ddl import quiet

times: dict[str, float] = {}


def note(name: str) -> None:
    """The part ends now, if it has not yet."""
    times.setdefault(name, time.time())


def write() -> None:
    """Writes the times in the order of their parts."""
    with open(os.environ["FIRST_STEP_TIMES"], "w") as file:
        file.writelines(f"{name}={moment}\n" for name, moment in times.items())


def noting(function: Callable[..., Any], before: str = "", after: str = "") -> Callable[..., Any]:
    """The same function, which notes that a part ends before it, or after it."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if before:
            note(before)
        result = function(*args, **kwargs)
        if after:
            note(after)
        return result

    return wrapped


with quiet.quiet_start_up():
    import ddl.train
    from ddl.pace import Pace
    from ddl.trainer import Trainer

loop = Pace.loop


@contextmanager
def noted_loop(pace: Pace) -> Iterator[Any]:
    """A loop that notes its end."""
    with loop(pace) as timer:
        yield timer
    note("first loop")


Pace.loop = noted_loop  # type: ignore[method-assign]
Trainer.trace = noting(Trainer.trace, before="build", after="trace")  # type: ignore[method-assign]
ddl.train.run = noting(ddl.train.run, before="imports")
atexit.register(write)

if __name__ == "__main__":
    ddl.main.run()
