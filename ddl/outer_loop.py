"""What happens between the loops on the devices: logs, evaluations, checkpoints, going back."""

import math

from ddl.actions import Action, EachLoop, Periodic
from ddl.checkpoints import Checkpoints
from ddl.console import RunConsole
from ddl.errors import TrainingDiverged, TrainingInterrupted
from ddl.run_plan import RunPlan
from ddl.signals import StopSignals
from ddl.trainer import Trainer
from ddl.writers import JsonLinesWriter, Writers


class OuterLoop:
    """Trains up to a step, and does between loops what a run plan says."""

    def __init__(
        self,
        trainer: Trainer,
        run_plan: RunPlan,
        checkpoints: Checkpoints,
        writers: Writers,
        json_lines: JsonLinesWriter,
        console: RunConsole,
        stop: StopSignals,
        evaluates: bool,
    ):
        """Takes the parts of a run.

        Args:
          trainer: As it was built or restored.
          run_plan: What happens when.
          checkpoints: Of this trainer.
          writers: Get the figures.
          json_lines: One of them, whose lines are on the disk before a checkpoint is.
          console: Shows progress.
          stop: Says when a signal has asked to stop.
          evaluates: Whether there are evaluations.
        """
        self._trainer = trainer
        self._run_plan = run_plan
        self._total = run_plan.total_steps(trainer.steps_per_epoch)
        self._checkpoints = checkpoints
        self._writers = writers
        self._json_lines = json_lines
        self._console = console
        self._stop = stop
        self._evaluated: tuple[int, dict[str, float]] = (-1, {})
        # The checkpoint comes last: once a step is saved, all that belongs to it is written.
        self._actions: list[Action] = [
            EachLoop(self._show_progress),
            Periodic(run_plan.log_every, self._log, last=self._total),
            *([Periodic(run_plan.eval_every, self._look, last=self._total)] if evaluates else []),
            Periodic(run_plan.checkpoint_every, self._save, last=self._total),
            EachLoop(self._stop_if_asked),
        ]

    def run(self) -> None:
        """Trains, and returns when the last checkpoint is on the disk.

        Raises:
          TrainingInterrupted: If a signal asked to stop; after saving.
          TrainingDiverged: If the loss is no longer finite, and the run may not go back.
          ModelDirectoryError: If the last checkpoint could not be written.
        """
        trainer = self._trainer
        self._stop.answer(trainer.request_stop)
        self._console.start(trainer.step, self._total)
        if self._run_plan.on_divergence == "rewind":
            self._save(trainer.step)  # so that there is one to go back to
        try:
            while trainer.step < self._total:
                try:
                    trainer.train(self._total - trainer.step, self._actions)
                except TrainingDiverged as error:
                    self._rewind(error)
                self._stop_if_asked(trainer.step)
            self._checkpoints.finish()
        finally:
            self._checkpoints.wait()

    def _show_progress(self, step: int) -> None:
        if self._console.shows_progress:
            figures = self._trainer.peek_metrics()
            self._add_speed(figures, self._trainer.pace.steps_per_second)
            self._console.advance(step, figures)

    def _log(self, step: int) -> None:
        trainer = self._trainer
        figures = trainer.read_metrics()
        figures["learning_rate"] = trainer.learning_rate
        if trainer.loss_scale is not None:
            figures["loss_scale"] = trainer.loss_scale
            figures["skipped_updates"] = trainer.skipped_updates
        if trainer.rewinds:
            figures["rewinds"] = trainer.rewinds
        self._add_speed(figures, trainer.pace.take_steps_per_second())
        self._writers.write(step, step / trainer.steps_per_epoch, "train", figures)

    def _look(self, step: int) -> None:
        figures = self._trainer.evaluate()
        self._writers.write(step, step / self._trainer.steps_per_epoch, "eval", figures)
        if not math.isfinite(figures["loss"]):
            raise TrainingDiverged(
                f"training diverged by step {step:,}: the loss on the evaluation data is not "
                "finite. Lower the learning rate, or clip the gradient."
            )
        self._evaluated = (step, figures)
        if self._checkpoints.would_be_best(figures):
            self._save(step)

    def _save(self, step: int) -> None:
        self._trainer.check_weights()
        evaluated_at, figures = self._evaluated
        metrics = figures if evaluated_at == step else {}
        self._checkpoints.save(metrics, first=self._json_lines.sync)

    def _stop_if_asked(self, step: int) -> None:
        if self._stop.received is not None and step < self._total:
            self._save(step)
            self._checkpoints.finish()
            raise TrainingInterrupted(
                f"stopped by {self._stop.received.name} at step {step:,} of {self._total:,}, "
                "after saving. The same command goes on from there."
            )

    def _rewind(self, error: TrainingDiverged) -> None:
        """Goes back to the last checkpoint and past the batch with which training diverged.

        All of this follows from the checkpoint and the data: a run that is killed meanwhile does
        the same again.
        """
        trainer = self._trainer
        rewinds, position = trainer.rewinds, int(trainer.state.batches)
        if self._run_plan.on_divergence == "stop":
            raise error
        if rewinds >= self._run_plan.max_rewinds:
            raise TrainingDiverged(f"{error} It had gone back {rewinds} times before.") from error
        self._checkpoints.restore_latest()
        first = int(trainer.state.batches)
        trainer.leave_out_batches(position, rewinds + 1)
        self._writers.drop_after(trainer.step)
        self._console.line(
            f"{error}\nGoing back to step {trainer.step:,}, and leaving out the batches from "
            f"{first:,} to {position - 1:,}. Rewind {rewinds + 1} of {self._run_plan.max_rewinds}."
        )

    def _add_speed(self, figures: dict[str, float], steps_per_second: float | None) -> None:
        if steps_per_second is not None:
            figures["examples_per_second"] = steps_per_second * self._trainer.global_batch_size
