"""The number of microbatches of a run, found by trials and set as ACCUMULATION_STEPS."""

import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ddl.cli.fitting.search import smallest_number
from ddl.cli.fitting.trial import UPDATES, Facts, arguments_of
from ddl.cli.flags import FLAGS, flags_of
from ddl.cli.loading import prepare
from ddl.errors import UNEXPECTED_STATUS, ConfigError, DdlError
from ddl.output import printable

if TYPE_CHECKING:
    from ddl.run.checks.microbatches import FactsOfRun

_OF_THIS_RUN_ALONE = (
    *("fit_memory", "memory_limit", "model_dir", "mode", "dry_run", "profile", "cluster"),
    "gin_bindings",  # a name of gin_param
)
_MACRO = "ACCUMULATION_STEPS"
_SAVED = re.compile(rf"^{_MACRO} = (\d+)$", re.MULTILINE)


def fit_memory() -> None:
    """Adds the binding of ACCUMULATION_STEPS to the parsed flags; prints each trial.

    A run that is resumed keeps its number, so that it ends as if it had not been stopped. Call it
    before TensorFlow has set up a device, whose memory the trials need.

    Raises:
      ConfigError: If several processes train, not even microbatches of one example fit, or a layer
        depends on the microbatches and those of the config do not fit.
      SystemExit: If a trial failed for another reason, which its process has printed.
    """
    if (number := _number_so_far()) is not None:
        _print(f"{_MACRO} = {number}, with which the run was trained so far.")
    else:
        _check_one_process()
        with tempfile.TemporaryDirectory(prefix="ddl-fit-memory-") as folder:
            number = _found(Path(folder))
    FLAGS["gin_param"].value = [*(FLAGS.gin_param or []), f"{_MACRO} = {number}"]


def _number_so_far() -> int | None:
    """Returns the number of a run that has a checkpoint of an update; None for another run."""
    if FLAGS.model_dir is None:
        return None
    folder = Path(FLAGS.model_dir)
    try:
        if not any((folder / "checkpoints").glob("step-[1-9]*.index")):
            return None
        saved = _SAVED.search((folder / "config.gin").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):  # the run reports it when it opens the directory
        return None
    return int(saved[1]) if saved else None


def _check_one_process() -> None:
    with prepare():  # Slurm's variables are parsed by TensorFlow
        from ddl.distribution.slurm import join_cluster
        from ddl.distribution.tf_config import cluster_role

        join_cluster(FLAGS.cluster)
        role = cluster_role()
    if len(role.workers) > 1 or role.cluster.get("ps"):
        raise ConfigError(
            f"--fit_memory must run in one process, got a cluster of {len(role.workers)} workers. "
            f"Find {_MACRO} on one machine with --cluster=none, then pass "
            f"--gin_param='{_MACRO} = N'."
        )


def _found(folder: Path) -> int:
    """Returns the number of microbatches to train with."""
    facts: FactsOfRun | None = None

    def fits(number: int) -> bool:
        nonlocal facts
        result = _trial(number, folder / f"{number}.json")
        facts = result.get("of_run", facts)
        if facts is None:
            raise ConfigError(
                "The model, its optimizer and the data do not fit into memory, before the first "
                "update. Keep the data on the host (--data_on_device=false), take a smaller model, "
                "or more memory."
            )
        with_peak = f", {result['peak']:,.0f} MiB at most" if "peak" in result else ""
        outcome = f"fits{with_peak}" if result["fits"] else "does not fit into memory"
        _print(f"{_MACRO} = {number}, microbatches of {_sizes(facts, number)}: {outcome}.")
        return result["fits"]

    # The first trial tells the sizes, of which each must divide into microbatches.
    first = fits(1)
    assert facts is not None  # else `fits` has raised
    batch = _common(facts["sizes"])
    number = 1 if first else smallest_number(batch, lambda one: one > 1 and fits(one))
    if number is None:
        raise ConfigError(
            f"Not even {batch} microbatches per replica fit into memory ({UPDATES} updates were "
            "tried). Use mixed_bfloat16, Trainer.remat, a smaller model, or more memory: see "
            "docs/memory.md."
        )
    configured, depends_on = facts["configured"], facts["depends_on"]
    if not depends_on or number == configured:
        instead = "" if number == configured else f", instead of {configured} of the config"
        _print(f"{_MACRO} = {number}{instead}.{_evaluations(facts, number)}")
        return number
    some = f"{', '.join(depends_on[:5])}{', …' if len(depends_on) > 5 else ''}"
    why = (
        f"The result depends on the number of microbatches ({some}), so --fit_memory changes "
        f"nothing: {_MACRO} = {configured} of the config"
    )
    if number > configured:
        raise ConfigError(
            f"{why} does not fit into memory, and {number} would. Pass "
            f"--gin_param='{_MACRO} = {number}' to train with it, or lower the global batch size."
        )
    _print(f"{why} stays. {_MACRO} = {number} would fit too, with larger microbatches.")
    return configured


def _trial(number: int, path: Path) -> Facts:
    """Returns the facts of a trial, which are incomplete if it ran out of memory early."""
    limit = FLAGS.memory_limit or 0
    names = [one.name for one in flags_of(FLAGS) if one.name not in _OF_THIS_RUN_ALONE]
    arguments = [*arguments_of(FLAGS, names), "--cluster=none"]
    environment = {name: text for name, text in os.environ.items() if name != "TF_CONFIG"}
    done = subprocess.run(
        [sys.executable, "-m", "ddl.cli.fitting.trial", str(number), str(limit), path, *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    facts: Facts = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if done.returncode == 0 and "fits" in facts:
        return facts
    # The system ends a process that takes all memory by SIGKILL; a library that cannot allocate
    # memory by SIGABRT.
    if done.returncode in (-6, -9):
        _print(f"The trial of {_MACRO} = {number} ended by signal {-done.returncode}.")
        return {**facts, "fits": False}
    sys.stderr.write(printable(done.stderr))
    sys.stderr.flush()
    status = done.returncode
    sys.exit(status if status == DdlError.exit_status else UNEXPECTED_STATUS)


def _common(sizes: Mapping[str, int]) -> int:
    """Returns the largest number of microbatches into which each batch divides."""
    return math.gcd(*sizes.values())


def _sizes(facts: "FactsOfRun", number: int) -> str:
    """Returns the sizes of microbatches as a text."""
    sizes = facts["sizes"].items()
    texts = [f"{f'{name} ' if name else ''}{size // number:,}" for name, size in sizes]
    return f"{', '.join(texts)} per {facts['part']}"


def _evaluations(facts: "FactsOfRun", number: int) -> str:
    if number == 1 or not facts["evaluates"]:
        return ""
    return " Evaluations take whole batches, forward only, which were not tried."


def _print(line: str) -> None:
    print(printable(f"--fit_memory: {line}"), flush=True)
