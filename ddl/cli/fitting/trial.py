"""A trial of `--fit_memory`, in a process of its own: some updates with a number of microbatches.

  python -m ddl.cli.fitting.trial NUMBER LIMIT facts.json <flags of ddl.main>

LIMIT is the memory of this process in MiB, or 0 for that of its GPUs. The facts of the run are
written to the file when the run is built, and again with the result when the updates are made.
"""

import json
import math
import os
import re
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from absl import flags

from ddl.cli.arguments import parse
from ddl.cli.commands import exiting_on_errors
from ddl.cli.flags import FLAGS, parse_gpus
from ddl.errors import ConfigError
from ddl.output import protect_standard_streams

if TYPE_CHECKING:
    from ddl.run.checks.microbatches import FactsOfRun

UPDATES = 2
"""Updates of a trial: the second one begins with what the first one keeps."""

_SECONDS_BETWEEN_LOOKS = 0.005
_STATUS = Path("/proc/self/status")


class Facts(TypedDict, total=False):
    """The result of a trial.

    Attributes:
      of_run: Facts of the run; missing if the process ended before it was built.
      fits: Whether the updates fit; missing if the process ended before.
      peak: Most memory in use, in MiB; on GPUs that of the GPU with the most.
    """

    of_run: "FactsOfRun"
    fits: bool
    peak: float


class _Result:
    """Writes the facts; a later write replaces an earlier one."""

    def __init__(self, path: Path, limit: int):
        self._path = path
        self._limit = limit
        self._facts = Facts()

    def built(self, of_run: "FactsOfRun") -> None:
        self._add({"of_run": of_run})

    def _add(self, facts: Facts) -> None:
        self._facts |= facts
        self._path.write_text(json.dumps(self._facts), encoding="utf-8")

    def watch(self) -> None:
        """Ends the process when it takes more memory than the limit."""
        while True:
            if peak_of_process() > self._limit:
                self.end(False)
            time.sleep(_SECONDS_BETWEEN_LOOKS)

    def end(self, fits: bool, peak: float | None = None) -> None:
        self._add(Facts(fits=fits) if peak is None else Facts(fits=fits, peak=peak))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # TensorFlow's own exit takes longer, and there is nothing to save


def peak_of_process(status: Path = _STATUS) -> float:
    """Returns the most memory that this process has had in use, in MiB.

    Args:
      status: Linux's file.
    """
    found = re.search(r"^VmHWM:\s*(\d+) kB", status.read_text(), re.MULTILINE)
    return int(found[1]) / 1024 if found else math.nan


def attempt(number: int, limit: int, result: _Result) -> None:
    """Builds the run with a number of microbatches, and makes some updates.

    The parsed flags are those of the run.

    Args:
      number: Value for ACCUMULATION_STEPS.
      limit: Memory of this process in MiB; 0 on GPUs.
      result: Takes the facts.

    Raises:
      DdlError: If the run cannot be built, or an update fails otherwise.
    """
    from ddl.cli.placing import build_placement

    placement = build_placement(parse_gpus(FLAGS.gpus))
    assert placement is not None  # --cluster=none starts no server
    import tensorflow as tf

    from ddl.config.registry import user_packages
    from ddl.run.checks.microbatches import make_updates
    from ddl.user_code import attributing_errors

    gpus = tf.config.list_logical_devices("GPU")
    if bool(gpus) == bool(limit):
        raise ConfigError(
            "--memory_limit is the memory of a process on CPUs, but this run has GPUs, whose "
            "memory decides. Leave it out."
            if gpus
            else "--fit_memory on CPUs needs --memory_limit, since a process that takes all memory "
            "may end others. Pass the memory of the process in MiB, such as --memory_limit=4000."
        )
    if limit:
        threading.Thread(target=result.watch, daemon=True).start()
    with attributing_errors(user_packages()):
        fit = make_updates(placement, number, UPDATES, result.built)
    if not fit:
        result.end(False)
    if limit:
        peak = peak_of_process()
        result.end(peak <= limit, peak)
    peaks = [tf.config.experimental.get_memory_info(gpu.name)["peak"] for gpu in gpus]
    result.end(True, max(peaks) / 2**20)


def run() -> None:
    """Runs the trial; exits with 1 for an error that the user can correct."""
    protect_standard_streams("ddl --fit_memory")
    program, number, limit, facts, *arguments = sys.argv
    with exiting_on_errors():
        parse(FLAGS, [program, *arguments])
        attempt(int(number), int(limit), _Result(Path(facts), int(limit)))


def arguments_of(values: flags.FlagValues, names: list[str]) -> list[str]:
    """Returns the given flags as arguments.

    Args:
      values: Parsed flags.
      names: Names of the flags; those that are not given are left out.
    """
    found = []
    for name in names:
        flag = values[name]
        if not flag.present:
            continue
        if isinstance(flag, flags.MultiFlag):
            found += [f"--{name}={one}" for one in flag.value]
        else:
            found.append(flag.serialize())
    return found


if __name__ == "__main__":
    run()
