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
from typing import TypedDict

from absl import flags

from ddl.cli.arguments import parse
from ddl.cli.commands import exiting_on_errors
from ddl.cli.flags import FLAGS, parse_gpus
from ddl.errors import ConfigError
from ddl.output import protect_standard_streams

UPDATES = 2
"""Updates of a trial: the second one begins with what the first one keeps."""

_SECONDS_BETWEEN_LOOKS = 0.005
_STATUS = Path("/proc/self/status")


class Facts(TypedDict, total=False):
    """Facts about a run, and the result of a trial.

    Attributes:
      sizes: Examples per replica and update of each source of training data, by its name.
      configured: ACCUMULATION_STEPS of the config.
      depends_on: What makes the result depend on the number of microbatches; empty if nothing.
      evaluates: Whether the run has evaluation data.
      fits: Whether the updates fit; missing if the process ended before.
      peak: Most memory in use, in MiB; on GPUs that of the GPU with the most.
    """

    sizes: dict[str, int]
    configured: int
    depends_on: list[str]
    evaluates: bool
    fits: bool
    peak: float


class _Result:
    """Writes the facts; a later write replaces an earlier one."""

    def __init__(self, path: Path, limit: int):
        self._path = path
        self._limit = limit
        self._facts = Facts()

    def add(self, facts: Facts) -> None:
        self._facts |= facts
        self._path.write_text(json.dumps(self._facts), encoding="utf-8")

    def watch(self) -> None:
        """Ends the process when it takes more memory than the limit."""
        while True:
            if peak_of_process() > self._limit:
                self.end(False)
            time.sleep(_SECONDS_BETWEEN_LOOKS)

    def end(self, fits: bool, peak: float | None = None) -> None:
        self.add(Facts(fits=fits) if peak is None else Facts(fits=fits, peak=peak))
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

    from ddl import config
    from ddl.config.registry import user_packages
    from ddl.distribution.workers import Workers
    from ddl.run.train import build
    from ddl.tasks.parts import seed_generators_of
    from ddl.training.checks.model import names_that_depend_on_microbatches
    from ddl.training.device_errors import device_errors
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
    configured = config.get_macro("ACCUMULATION_STEPS")
    config.set_macro("ACCUMULATION_STEPS", number)
    try:
        with attributing_errors(user_packages()), device_errors():
            _, trainer = build(placement, Workers(placement.strategy))
            if trainer.accumulation_steps != number:
                raise ConfigError(
                    "--fit_memory sets the macro ACCUMULATION_STEPS, but the config binds "
                    f"Trainer.accumulation_steps = {trainer.accumulation_steps}. Bind it to "
                    "%ACCUMULATION_STEPS, as ddl/standard.gin does."
                )
            replicas = placement.strategy.num_replicas_in_sync
            of_task = [type(trainer.task).__name__] if seed_generators_of(trainer.task) else []
            result.add(
                {
                    "sizes": {
                        name: one.global_batch_size // replicas
                        for name, one in trainer.pipelines.items()
                    },
                    "configured": configured or 1,
                    "depends_on": [
                        *names_that_depend_on_microbatches(trainer.training_layers),
                        *of_task,
                    ],
                    "evaluates": trainer.has_eval_data,
                }
            )
            trainer.train(UPDATES, progress=False)
    except Exception as error:
        if not _is_out_of_memory(error):
            raise
        result.end(False)
    if limit:
        peak = peak_of_process()
        result.end(peak <= limit, peak)
    peaks = [tf.config.experimental.get_memory_info(gpu.name)["peak"] for gpu in gpus]
    result.end(True, max(peaks) / 2**20)


def _is_out_of_memory(error: BaseException | None) -> bool:
    import tensorflow as tf

    while error is not None:
        if isinstance(error, MemoryError | tf.errors.ResourceExhaustedError):
            return True
        error = error.__cause__
    return False


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
