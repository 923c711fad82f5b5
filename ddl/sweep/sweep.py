"""A whole sweep: from the flags to the table."""

import dataclasses
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ddl import config
from ddl.choices import Pin
from ddl.cli.loading import prepare
from ddl.cli.terminal import width
from ddl.errors import (
    UNEXPECTED_STATUS,
    ConfigError,
    DdlError,
    TrainingDiverged,
    TrainingInterrupted,
    did_you_mean,
)
from ddl.figures import Direction
from ddl.launcher.pinning import pin_equally
from ddl.output import printable, say
from ddl.sweep import results
from ddl.sweep.axes import Point, params
from ddl.sweep.definition import (
    RUNS,
    Definition,
    base_bindings,
    extended,
    locked,
    read,
    write,
)
from ddl.sweep.files import progress
from ddl.sweep.halving import Halving
from ddl.sweep.preflight import Facts
from ddl.sweep.scheduler import Metric, Scheduler, command_of


@dataclasses.dataclass(frozen=True)
class Config:
    """The base config of a sweep, as flags of ddl.main name it.

    Attributes:
      files: Config files.
      params: Single statements, read after the files.
      search_path: Further folders to search.
      allow_unused: Names of bindings that may go unused.
    """

    files: Sequence[str]
    params: Sequence[str] = ()
    search_path: Sequence[str] = ()
    allow_unused: Sequence[str] = ()

    @property
    def flags(self) -> list[str]:
        """The flags of ddl.main."""
        return [
            *(f"--gin_file={file}" for file in self.files),
            *(f"--gin_search_path={folder}" for folder in self.search_path),
            *([f"--gin_allow_unused={','.join(self.allow_unused)}"] if self.allow_unused else []),
            *(f"--gin_param={param}" for param in self.params),
        ]


@dataclasses.dataclass(frozen=True)
class Sweep:
    """A sweep, as its flags describe it.

    Attributes:
      folder: The folder of the sweep.
      base: The base config.
      points: The points, one for each run.
      axes: The flags that describe the points.
      metric: The metric to report.
      direction: Whether the largest or the smallest metric is best.
      halving: Rungs at which hopeless settings stop, if any.
      flags: Further flags of ddl.main.
      at_once: Number of runs at a time.
      pin: Whether each run gets its own cores, its own GPU, or neither.
      max_restarts: How often a run is restarted after a failure of the system.
    """

    folder: Path
    base: Config
    points: Sequence[Point]
    axes: dict[str, object]
    metric: Metric
    direction: Direction
    halving: Halving | None
    flags: Sequence[str]
    at_once: int
    pin: Pin
    max_restarts: int


def run(sweep: Sweep, dry_run: bool = False) -> int:
    """Checks a sweep, makes its runs, prints and writes the table. Main thread only.

    Args:
      sweep: The sweep.
      dry_run: Check and list the runs, and start none.

    Returns:
      The exit status of the command.

    Raises:
      DdlError: If the sweep or its config is wrong, or a file cannot be written.
    """
    base = sweep.base
    places = pin_equally(sweep.at_once, sweep.pin, "--at_once")
    bindings = base_bindings(base.files, base.params, base.search_path, sweep.points)
    definition = Definition(bindings, sweep.points, sweep.axes)
    saved = read(sweep.folder)
    added = extended(sweep.folder, saved, definition)
    found = {name: progress(sweep.folder / RUNS / name, *sweep.metric) for name in definition.runs}
    if not all(one.over for one in found.values()):
        check(sweep)
    say(_summary(sweep, definition, saved, added, sum(one.over for one in found.values())))
    if dry_run:
        for name in definition.runs:
            print(printable(name))
        return 0
    with locked(sweep.folder):
        if saved is None or added:
            write(sweep.folder, definition)
        scheduler = Scheduler(
            sweep.folder,
            {
                name: command_of(name, sweep.folder, [*flags_of(sweep), *_params(point)])
                for name, point in definition.runs.items()
            },
            definition.settings,
            sweep.metric,
            sweep.halving,
            places,
            sweep.max_restarts,
        )
        scheduler.run()
        decisions = scheduler.decisions()
        rows = results.rows(
            definition.runs, scheduler.runs, scheduler.errors, decisions, sweep.direction
        )
        results.write(sweep.folder, rows, *sweep.metric, sweep.direction)
    results.show(rows, sweep.metric.name, sweep.direction, width())
    say(f"Wrote results.json and results.csv to {sweep.folder}.")
    _check_reported(sweep, scheduler)
    return _status(scheduler)


def flags_of(sweep: Sweep) -> list[str]:
    """Returns the flags of ddl.main that all runs have."""
    return [*sweep.base.flags, *sweep.flags, "--cluster=none"]


def check(sweep: Sweep) -> None:
    """Checks the config with each point, and builds the first run, before any is started.

    Raises:
      ConfigError: If the config is wrong, no run reports the metric, or a rung does not fit.
      SystemExit: If the check of the config failed in its process, which has told why.
    """
    base, first = sweep.base, sweep.points[0]
    # What needs no TensorFlow is checked here, at once.
    with prepare():
        config.read(base.files, [*base.params, *params(first)], base.search_path, base.allow_unused)
    with tempfile.TemporaryDirectory(prefix="ddl-sweep-") as folder:
        points, facts = Path(folder, "points.json"), Path(folder, "facts.json")
        points.write_text(json.dumps([params(point) for point in sweep.points]))
        arguments = [str(points), str(facts), *flags_of(sweep), *_params(first)]
        environment = {name: text for name, text in os.environ.items() if name != "TF_CONFIG"}
        done = subprocess.run(
            [sys.executable, "-m", "ddl.sweep.preflight", *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        if done.returncode:
            sys.exit(done.returncode if done.returncode > 0 else UNEXPECTED_STATUS)
        check_facts(sweep, json.loads(facts.read_text()))


def check_facts(sweep: Sweep, facts: Facts) -> None:
    """Checks metric and rungs against the first run.

    Raises:
      ConfigError: If the run reports no such metric, or a rung does not fit its length or periods.
    """
    name, split = sweep.metric
    known = facts["eval"] if split == "eval" else facts["train"]
    if split == "eval" and not known:
        raise ConfigError(
            "The runs must evaluate, since --split is eval, but there is no data to evaluate on. "
            "Bind Trainer.eval_data, or pass --split=train."
        )
    if name not in known and not facts["has_callbacks"]:
        raise ConfigError(
            f"--metric must be a figure that the runs report ({', '.join(known)}), got {name!r}."
            f"{did_you_mean(name, known)}"
        )
    if sweep.halving is None:
        return
    period, macro = facts["eval_every"], "EVAL_EVERY"
    if split == "train":
        period, macro = facts["log_every"], "LOG_EVERY"
    for rung in sweep.halving.rungs:
        if rung >= facts["total"]:
            raise ConfigError(
                f"--rungs must be below the {facts['total']:,} steps of a run, got {rung:,}. Leave "
                "it out."
            )
        if period is None:
            raise ConfigError(
                f"--rungs compares the runs at step {rung:,}, but they evaluate only at their end, "
                f"since EVAL_EVERY is None. Set EVAL_EVERY = {math.gcd(*sweep.halving.rungs)}."
            )
        if rung % period:
            raise ConfigError(
                f"--rungs must be multiples of {macro} = {period}, at which the runs report the "
                f"metric, got {rung:,}. Change the rung, or {macro}."
            )


def _summary(
    sweep: Sweep, definition: Definition, saved: Definition | None, added: Sequence[str], ended: int
) -> str:
    number = len(definition.runs)
    text = f"{number} {'run' if number == 1 else 'runs'} in {sweep.folder / RUNS}"
    if saved is not None and added:
        text += f"; the sweep is extended by {len(added)}"
    if saved is not None:
        text += f"; {ended} have ended before"
    return f"{text}."


def _params(point: Point) -> list[str]:
    return [f"--gin_param={param}" for param in params(point)]


def _check_reported(sweep: Sweep, scheduler: Scheduler) -> None:
    """Raises ConfigError if runs have finished and none has reported the metric."""
    finished = [one for one in scheduler.runs.values() if one.finished]
    if finished and not any(one.values for one in finished):
        names = list(dict.fromkeys(name for one in finished for name in one.names))
        raise ConfigError(
            f"--metric must be a figure that the runs report ({', '.join(names) or 'none'}), got "
            f"{sweep.metric.name!r}.{did_you_mean(sweep.metric.name, names)}"
        )


def _status(scheduler: Scheduler) -> int:
    """Returns the exit status of the command."""
    if DdlError.exit_status in scheduler.errors.values():
        return DdlError.exit_status
    if scheduler.errors:
        return UNEXPECTED_STATUS
    if scheduler.asked_to_stop and any(not one.over for one in scheduler.runs.values()):
        return TrainingInterrupted.exit_status
    if all(one.diverged for one in scheduler.runs.values()):
        return TrainingDiverged.exit_status
    return 0
