"""The tracker Weights & Biases."""

import dataclasses
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from ddl.errors import ConfigError
from ddl.run.trackers.tracker import Status, check_installed


@dataclasses.dataclass(frozen=True)
class WeightsAndBiases:
    """Sends the figures of a run to Weights & Biases.

    Attributes:
      project: Project of the run; None takes WANDB_PROJECT, or the service's default.
      entity: User or team; None takes WANDB_ENTITY, or the user's default.
      run_name: Name of the run; None lets the service choose one.
      group: Group of the run, such as that of all seeds of a setting.
      tags: Tags of the run.
      mode: `online`, `offline`, which only writes files for `wandb sync`, or None: WANDB_MODE, or
        online.

    Raises:
      ConfigError: If the package wandb is not installed, or the mode is unknown.
    """

    project: str | None = None
    entity: str | None = None
    run_name: str | None = None
    group: str | None = None
    tags: Sequence[str] = ()
    mode: Literal["online", "offline"] | None = None

    name = "wandb"

    def __post_init__(self) -> None:
        if self.mode not in (None, "online", "offline"):
            raise ConfigError(
                f"WeightsAndBiases.mode must be 'online', 'offline' or None, got {self.mode!r}."
            )
        check_installed("wandb", "wandb", "WeightsAndBiases")

    def begin(self, folder: Path | None, settings: Mapping[str, Any], run_id: str | None) -> "_Run":
        """See `ddl.run.trackers.Tracker`."""
        import wandb

        run = wandb.init(
            project=self.project,
            entity=self.entity,
            name=self.run_name,
            group=self.group,
            tags=list(self.tags),
            mode=self.mode,
            dir=folder,
            id=run_id or uuid.uuid4().hex[:8],
            resume="allow",
            config=dict(settings),
        )
        # W&B's own step must grow; a resumed or rewound run repeats steps.
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        return _Run(run)


class _Run:
    def __init__(self, run: Any):
        self.id: str = run.id
        self._run = run

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log({"step": step, **figures})

    def end(self, status: Status) -> None:
        self._run.finish(exit_code=1 if status == "failed" else 0)
