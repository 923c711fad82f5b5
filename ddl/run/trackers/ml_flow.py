"""The tracker MLflow."""

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddl.run.trackers.tracker import Status, check_installed

_STATUSES = {"done": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}

# Limits of MLflow's REST interface.
_METRICS_OF_A_BATCH, _PARAMETERS_OF_A_BATCH = 1000, 100


@dataclasses.dataclass(frozen=True)
class MLflow:
    """Sends the figures of a run to MLflow.

    Attributes:
      tracking_uri: Address of the tracking server or store; None takes MLFLOW_TRACKING_URI, or
        MLflow's default.
      experiment: Name of the experiment, which is created if missing.
      run_name: Name of the run; None lets MLflow choose one.

    Raises:
      ConfigError: If the package mlflow is not installed.
    """

    tracking_uri: str | None = None
    experiment: str = "ddl"
    run_name: str | None = None

    name = "mlflow"

    def __post_init__(self) -> None:
        check_installed("mlflow", "mlflow", "MLflow")

    def begin(self, folder: Path | None, settings: Mapping[str, Any], run_id: str | None) -> "_Run":
        """See `ddl.run.trackers.Tracker`."""
        from mlflow import MlflowClient
        from mlflow.entities import Param

        client = MlflowClient(tracking_uri=self.tracking_uri)
        if run_id is not None:
            client.update_run(run_id, status="RUNNING")
            return _Run(client, run_id)
        found = client.get_experiment_by_name(self.experiment)
        experiment = found.experiment_id if found else client.create_experiment(self.experiment)
        run_id = client.create_run(experiment, run_name=self.run_name).info.run_id
        parameters = [Param(name, str(value)) for name, value in settings.items()]
        for start in range(0, len(parameters), _PARAMETERS_OF_A_BATCH):
            client.log_batch(run_id, params=parameters[start : start + _PARAMETERS_OF_A_BATCH])
        return _Run(client, run_id)


class _Run:
    def __init__(self, client: Any, run_id: str):
        self.id = run_id
        self._client = client

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, step) for name, value in figures.items()]
        for start in range(0, len(metrics), _METRICS_OF_A_BATCH):
            self._client.log_batch(self.id, metrics[start : start + _METRICS_OF_A_BATCH])

    def end(self, status: Status) -> None:
        self._client.set_terminated(self.id, _STATUSES[status])
