"""The replay of a run in this process: built from its config, restored, trained on."""

import dataclasses
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ddl.callbacks.calling import holders_of
from ddl.checking.recorder import Recorder
from ddl.checking.recording import Recording
from ddl.checkpoints.checkpoints import Checkpoints
from ddl.checkpoints.directory import CheckpointDamagedError, CheckpointDirectory
from ddl.checkpoints.retention import Retention
from ddl.distribution.workers import Workers
from ddl.errors import ConfigError, ModelDirectoryError
from ddl.optimizers.named import by_name
from ddl.optimizers.plateau import plateaus_of
from ddl.replay.batches import indices_of
from ddl.replay.digests import state_of
from ddl.replay.recorded import Recorded
from ddl.run import train
from ddl.run.console import RunConsole
from ddl.run.directory import NoCheckpoints
from ddl.run.loop import OuterLoop
from ddl.run.placement import Placement
from ddl.run.training_run import warm_start
from ddl.run.writers import Writers
from ddl.step.observing import observed_by

_ALL = Retention(last=2**31)


class Replayer:
    """Replays a run, whose config must be loaded. Eager, cross-replica context, in one process.

    Writes nothing below the run's directory.
    """

    def __init__(self, run: Path, folder: Path, placement: Placement, *, in_detail: bool):
        """Builds model, data and optimizer of the run, with its initial weights.

        Args:
          run: The directory of the run.
          folder: A folder for states, recordings and links to the run's checkpoints.
          placement: Where to compute.
          in_detail: Whether to record values. The operations for this may change last bits.

        Raises:
          DdlError: As `ddl.run.train.build`.
        """
        self._folder = folder
        self._saved = CheckpointDirectory(run / "checkpoints")
        self._recording = Recording()
        self._recorder: Recorder | None = None
        if in_detail:
            self._recorder = Recorder(placement.strategy, self._recording, in_detail=True)
        self._console = RunConsole(shows=False)
        self._links = 0
        self._is_fresh = True
        self._initial: str | None = None
        self._notes: list[str] = []
        with self._watched():
            self._plan, self._trainer = train.build(placement, Workers(placement.strategy))
        # Evaluations matter to what acts on them.
        acts = plateaus_of(self._trainer.optimizer) or self._plan.calls
        self._evaluates = bool(acts) and self._trainer.has_eval_data
        if self._recorder is not None:
            self._recorder.optimizers = by_name(self._trainer.optimizer)

    def do(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Carries out a command: the method of this name; adds notes since the last one."""
        commands: dict[str, Callable[..., dict[str, Any]]] = {
            "begin": self.begin,
            "train": self.train,
            "save": self.save,
            "restore": self.restore,
            "saved": self.saved,
            "record": self.record,
        }
        result = commands[do](**arguments)
        notes, self._notes = self._notes, []
        return {**result, "notes": notes}

    def begin(self, step: int) -> dict[str, Any]:
        """Restores the run's newest readable checkpoint up to a step, or else the initial weights.

        Returns:
          "step", and "rewinds" of the run so far.
        """
        for saved in reversed(self._saved.saved()):
            if saved.step > step:
                continue
            try:
                self._saved.check(saved)
            except CheckpointDamagedError as error:
                self._notes.append(f"{saved} is damaged ({error}) and was left out.")
                continue
            self.restore(saved.prefix)
            return {"step": saved.step, "rewinds": int(self._trainer.state.rewinds)}
        if self._initial is not None:
            self.restore(self._initial)
        elif not self._is_fresh:
            raise ConfigError("The initial weights are gone: the replay has begun elsewhere.")
        else:
            warm_start(self._trainer, self._plan, self._console)
            self._initial = self.save()["prefix"]
        return {"step": 0, "rewinds": 0}

    def saved(self, step: int) -> dict[str, Any]:
        """Returns "digests", "names" and "rewinds" of the run's own checkpoint of a step."""
        found = self._saved.at(step)
        try:
            self._saved.check(found)
        except CheckpointDamagedError as error:
            raise ModelDirectoryError(
                f"{found} is damaged: {error}. Remove it from a copy of the run, and replay that."
            ) from error
        return state_of(found.prefix)._asdict()

    def train(self, to: int) -> dict[str, Any]:
        """Trains to a step as the run did: with its callbacks, and evaluations that matter to them.

        Returns:
          "step".
        """
        self._is_fresh = False
        trainer = self._trainer
        if trainer.step < to:
            plan = dataclasses.replace(
                self._plan, on_divergence="stop", early_stopping=None, trackers=()
            )
            # A run may have been continued with more steps than its config says now.
            if plan.total_steps(trainer.steps_per_epoch) < to:
                plan = dataclasses.replace(plan, train_steps=to, train_epochs=None)
            parts = (trainer, plan, NoCheckpoints(), Writers([]), self._console, None)
            with self._watched():
                OuterLoop(*parts, evaluates=self._evaluates).run(until=to)
            if trainer.step < to:
                raise ConfigError(
                    f"A callback ended the replay at step {trainer.step:,}, before step {to:,}. "
                    "The code or the data have changed since the run."
                )
        return {"step": trainer.step}

    def save(self) -> dict[str, Any]:
        """Saves the state that was reached.

        Returns:
          "prefix" of the checkpoint, and "digests", "names" and "rewinds" as `saved`.
        """
        checkpoints = self._checkpoints(self._new_folder())
        checkpoints.save()
        checkpoints.finish()
        prefix = str(checkpoints.folder / f"step-{self._trainer.step}")
        return {"prefix": prefix, **state_of(prefix)._asdict()}

    def restore(self, prefix: str) -> dict[str, Any]:
        """Restores a checkpoint, of this or another process, or of the run.

        Args:
          prefix: Path of its files without their endings.
        """
        original = Path(prefix)
        folder = self._new_folder()
        for file in original.parent.glob(f"{original.name}.*"):
            os.symlink(file.absolute(), folder / file.name)
        try:
            self._checkpoints(folder).restore_latest()
        except ModelDirectoryError as error:
            raise ModelDirectoryError(
                str(error).replace(str(folder), str(original.parent))
            ) from error
        self._is_fresh = False
        return {"step": self._trainer.step}

    def record(self, to: int) -> dict[str, Any]:
        """Trains to a step and records the values of each update, and the variables before.

        Returns:
          "file", the path of a pickled `Recorded`.
        """
        recorder, trainer = self._recorder, self._trainer
        assert recorder is not None
        self._recording.values.clear()
        recorder.update = trainer.step
        recorder.variables(trainer)
        indices, digests = {}, {}
        for step in range(trainer.step + 1, to + 1):
            recorder.update = step
            first = int(trainer.state.batches)
            self.train(step)
            recorder.variables(trainer)
            digests[step] = self.save()["digests"]
            last = int(trainer.state.batches)
            indices[step] = {
                name: indices_of(one, first, last) for name, one in trainer.pipelines.items()
            }
        file = self._new_folder() / "recorded.pickle"
        file.write_bytes(pickle.dumps(Recorded(self._recording, indices, digests)))
        return {"file": str(file)}

    def _checkpoints(self, folder: Path) -> Checkpoints:
        """Returns new checkpoints, which know of no step that they hold."""
        holders = holders_of(self._plan.calls)
        return Checkpoints(
            folder, self._trainer, _ALL, report=self._notes.append, callbacks=holders
        )

    def _new_folder(self) -> Path:
        self._links += 1
        folder = self._folder / f"state-{self._links}"
        folder.mkdir()
        return folder

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Lets the recorder, if there is one, see what is traced in the `with` block."""
        if self._recorder is None:
            yield
            return
        with observed_by(self._recorder), self._recorder.watching():
            yield
