"""Trackers of experiments, to which a run sends its figures: Weights & Biases, MLflow."""

import dataclasses
import importlib.util
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from ddl.checkpoints.directory import write_atomically
from ddl.errors import ConfigError, TrainingInterrupted, installing, message_of
from ddl.run.directory import RunDirectory

Status = Literal["done", "stopped", "failed"]


class Tracker(Protocol):
    """A service that keeps the figures of runs. Called on the chief alone.

    Attributes:
      name: Name of its folder in the run's directory.
    """

    name: str

    def begin(self, folder: Path | None, settings: Mapping[str, Any], run_id: str | None) -> str:
        """Begins a run, or continues one.

        Args:
          folder: A folder for files of the tracker; None if the run writes no files.
          settings: The macros of the config, by name.
          run_id: Id of the tracker's run to continue; None begins a new one.

        Returns:
          The id, by which a resumed run finds the tracker's run again.
        """

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Sends figures by name, such as "train/loss", without waiting for the service."""

    def end(self, status: Status) -> None:
        """Sends what is pending, and ends the tracker's run."""


class TrackerWriter:
    """Sends figures to a tracker (`ddl.run.writers.Writer`).

    If the tracker fails, this is reported once, and nothing more is sent. The tracker keeps the
    figures of steps that a run repeats.
    """

    def __init__(
        self, tracker: Tracker, directory: RunDirectory | None, report: Callable[[str], None]
    ):
        """Begins the tracker's run, or continues that of an earlier call.

        Args:
          tracker: The tracker.
          directory: The directory of the run, if any.
          report: Called with a message when the tracker fails.
        """
        self._tracker = tracker
        self._report = report
        self._works, self._handled = True, sys.exc_info()[1]
        self._try(self._begin, directory)

    def write(self, step: int, epoch: float, split: str, values: Mapping[str, float]) -> None:
        """See `Writer`."""
        figures = {f"{split}/{name}": value for name, value in values.items()}
        self._try(self._tracker.log, step, {"epoch": epoch, **figures})

    def close(self) -> None:
        """Ends the tracker's run, with the status of the error in progress, if any."""
        error = sys.exc_info()[1]  # a run closes its writers while its error is handled
        stopped = isinstance(error, TrainingInterrupted | KeyboardInterrupt)
        is_done = error is self._handled  # None, or what the caller handles by this run
        status: Status = "done" if is_done else "stopped" if stopped else "failed"
        self._try(self._tracker.end, status)

    def _try(self, call: Callable[..., None], *arguments: Any) -> None:
        """Calls the tracker, until it fails."""
        try:
            if self._works:
                call(*arguments)
        except Exception as error:  # a service and its client may raise anything
            self._works = False
            self._report(
                f"The tracker {self._tracker.name} failed and gets no more figures: "
                f"{message_of(error):.500}\nTraining continues, and a resumed run tries again."
            )

    def _begin(self, directory: RunDirectory | None) -> None:
        if directory is None:
            self._tracker.begin(None, {}, None)
            return
        file = directory.path / "trackers" / self._tracker.name / "run_id"
        file.parent.mkdir(parents=True, exist_ok=True)
        run_id = file.read_text().strip() if file.exists() else None
        run_id = self._tracker.begin(file.parent, directory.macros(), run_id)
        write_atomically(file, run_id + "\n")


def _check_installed(module: str, name: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise ConfigError(f"{name} needs the package {module}. {installing(module)}")


@dataclasses.dataclass
class WeightsAndBiases:
    """Sends the figures of a run to Weights & Biases.

    The environment has the other settings, such as WANDB_MODE=offline, WANDB_NAME, WANDB_ENTITY,
    WANDB_TAGS and WANDB_RUN_GROUP.

    Attributes:
      project: Project of the run; None takes WANDB_PROJECT, or the service's default.

    Raises:
      ConfigError: If the package wandb is not installed.
    """

    project: str | None = None

    name = "wandb"

    def __post_init__(self) -> None:
        _check_installed("wandb", "WeightsAndBiases")

    def begin(self, folder: Path | None, settings: Mapping[str, Any], run_id: str | None) -> str:
        """See `Tracker`."""
        import wandb

        run_id = run_id or uuid.uuid4().hex[:8]
        options = {"id": run_id, "resume": "allow", "config": dict(settings)}
        self._run = wandb.init(project=self.project, dir=folder, **options)
        # W&B's own step must grow; a resumed run repeats steps.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        return run_id

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """See `Tracker`."""
        self._run.log({"step": step, **figures})  # another process sends them

    def end(self, status: Status) -> None:
        """See `Tracker`."""
        self._run.finish(exit_code=1 if status == "failed" else 0)


@dataclasses.dataclass
class MLflow:
    """Sends the figures of a run to MLflow. MLflow chooses its name.

    Attributes:
      tracking_uri: Address of the tracking server or store; None takes MLFLOW_TRACKING_URI, or
        MLflow's default.
      experiment: Name of the experiment, which is created if missing.

    Raises:
      ConfigError: If the package mlflow is not installed.
    """

    tracking_uri: str | None = None
    experiment: str = "ddl"

    name = "mlflow"

    def __post_init__(self) -> None:
        _check_installed("mlflow", "MLflow")

    def begin(self, folder: Path | None, settings: Mapping[str, Any], run_id: str | None) -> str:
        """See `Tracker`."""
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client, self._last = MlflowClient(tracking_uri=self.tracking_uri), None
        if run_id is not None:
            self._client.update_run(run_id, status="RUNNING")
            self._id = run_id
            return run_id
        found = self._client.get_experiment_by_name(self.experiment)
        place = found.experiment_id if found else self._client.create_experiment(self.experiment)
        self._id = str(self._client.create_run(place).info.run_id)
        parameters = [Param(name, str(value)) for name, value in settings.items()]
        self._client.log_batch(self._id, params=parameters)
        return self._id

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """See `Tracker`."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, step) for name, value in figures.items()]
        self._last = self._client.log_batch(self._id, metrics, synchronous=False)

    def end(self, status: Status) -> None:
        """See `Tracker`."""
        if self._last is not None:
            self._last.wait()  # MLflow sends them in order
        kinds = {"done": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
        self._client.set_terminated(self._id, kinds[status])
