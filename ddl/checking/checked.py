"""The check of one task, or of several at once."""

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddl.checking.configurations import ONE
from ddl.checking.processes import record
from ddl.checking.report import Report, report_on
from ddl.errors import ConfigError


def check(factory: str) -> Report:
    """Checks that a task computes the same on any number of replicas and microbatches.

    The task makes three updates on 1, 2 and 4 virtual CPU devices with 1 and 2 microbatches each,
    on its first examples, so that the last batch has padding. A run resumes in a fresh process,
    where it must compute the same bits. All runs compute in float64, in processes of their own.

    Args:
      factory: Name of a function in a module, such as "my_package.my_module:make_trainer". It is
        called as function(strategy=…, accumulation_steps=…) under the strategy's scope, and
        returns a new `ddl.Trainer`. It must pass both arguments on to the trainer.

    Returns:
      The report, with the first difference of each configuration.

    Raises:
      ConfigError: If the function cannot be imported, or makes no such trainer.

    Example:
      >>> def test_my_step():
      ...     check("my_tasks:gan").raise_if_different()
    """
    return check_all([factory])[factory]


def check_all(factories: Sequence[str]) -> dict[str, Report]:
    """Checks several tasks in the same processes, which saves the imports of TensorFlow.

    Args:
      factories: As the argument of `check`.

    Raises:
      ConfigError: As `check`.
    """
    for factory in factories:
        _check_name(factory)
    reports = _checked([{"factory": factory} for factory in factories])
    return dict(zip(factories, reports, strict=True))


def _check_name(factory: Any) -> None:
    """Raises ConfigError unless a factory is the name of a function that processes can import."""
    takes = 'check takes the name of a function in a module, such as "my_tasks:gan", got '
    if not isinstance(factory, str):
        raise ConfigError(
            f"{takes}{factory!r:.80}. The check calls the function in processes of its own, which "
            "import it by its name."
        )
    module, _, name = factory.partition(":")
    if not module or not name.isidentifier():
        raise ConfigError(f"{takes}{factory!r}.")
    if module == "__main__":
        raise ConfigError(
            f"{takes}{factory!r}, a function of this program or notebook, which the processes of "
            "the check cannot import. Write it into a file, such as my_tasks.py."
        )


def check_config(
    files: Sequence[str],
    params: Sequence[str] = (),
    search_path: Sequence[str] = (),
    allow_unused: Sequence[str] = (),
) -> Report:
    """Checks the task of a config, as `check` does.

    Args:
      files: The gin files.
      params: Further bindings.
      search_path: Folders to search for the files.
      allow_unused: Names of bindings that may go unused.

    Raises:
      ConfigError: If the config cannot be loaded, or binds PER_REPLICA_BATCH_SIZE.
    """
    gin = {
        "files": list(files),
        "params": list(params),
        "search_path": list(search_path),
        "allow_unused": list(allow_unused),
    }
    (report,) = _checked([{"gin": gin}])
    return report


def _checked(jobs: Sequence[Mapping[str, Any]]) -> list[Report]:
    # Not a TemporaryDirectory, which a fork of this process would remove at its end.
    folder = Path(tempfile.mkdtemp(prefix="ddl-check-"))
    try:
        recordings = record(jobs, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for of_job in recordings:
        batch = of_job[ONE].batch_size
        if batch is not None and batch % 2:
            raise ConfigError(
                f"The global batch size must be even to be divided among replicas, got {batch}. "
                "Check the task with a batch of 16."
            )
    return [report_on(of_job) for of_job in recordings]
