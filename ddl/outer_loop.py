"""What happens between the loops on the devices: logs, evaluations, checkpoints, going back."""

import math
from contextlib import suppress

from ddl.actions import Action, EachLoop, Periodic
from ddl.checkpoints import Checkpoints
from ddl.console import RunConsole
from ddl.errors import ModelDirectoryError, TrainingDiverged, TrainingInterrupted
from ddl.learning_rate import learning_rate_at
from ddl.plateau import ReduceOnPlateau, plateau_of
from ddl.run_plan import RunPlan
from ddl.signals import StopSignals
from ddl.trainer import Trainer
from ddl.workers import Workers
from ddl.writers import Writers


class OuterLoop:
    """Trains up to a step, and does between loops what a run plan says."""

    def __init__(
        self,
        trainer: Trainer,
        run_plan: RunPlan,
        checkpoints: Checkpoints,
        writers: Writers,
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
          console: Shows progress.
          stop: Says when a signal has asked to stop.
          evaluates: Whether there are evaluations.
        """
        self._trainer = trainer
        self._run_plan = run_plan
        self._total = run_plan.total_steps(trainer.steps_per_epoch)
        self._checkpoints = checkpoints
        self._writers = writers
        self._console = console
        self._stop = stop
        self._plateau = plateau_of(trainer.optimizer)
        self._workers = Workers(trainer.strategy)
        self._evaluated: tuple[int, dict[str, float]] = (-1, {})
        last = self._total
        evaluations = [Periodic(run_plan.eval_every, self._evaluate, last)] if evaluates else []
        # The checkpoint comes last: once a step is saved, all that belongs to it is written.
        self._actions: list[Action] = [
            EachLoop(self._show_progress),
            Periodic(run_plan.log_every, self._log, last),
            *evaluations,
            Periodic(run_plan.checkpoint_every, self._save, last),
        ]

    def run(self) -> None:
        """Trains, and returns when the last checkpoint is on the disk.

        Raises:
          TrainingInterrupted: If a signal asked to stop; after saving.
          TrainingDiverged: If the loss is no longer finite, and the run may not go back.
          ModelDirectoryError: If the last checkpoint could not be written.
        """
        trainer = self._trainer
        self._console.start(trainer.step, self._total)
        if self._run_plan.on_divergence == "rewind" and not self._checkpoints.has_any():
            self._save(trainer.step)  # so that there is one to go back to
        try:
            while trainer.step < self._total:
                try:
                    trainer.train(self._total - trainer.step, self._actions)
                    self._stop_if_asked(trainer.step)
                except TrainingDiverged as error:
                    if self._run_plan.on_divergence == "stop":
                        raise
                    self._rewind(error)
            self._finish()
        finally:
            with suppress(ModelDirectoryError):  # told already
                self._checkpoints.finish()

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
        if rewinds := int(trainer.state.rewinds):
            figures["rewinds"] = rewinds
        self._add_speed(figures, trainer.pace.take_steps_per_second())
        self._writers.write(step, step / trainer.steps_per_epoch, "train", figures)

    def _evaluate(self, step: int) -> None:
        figures = self._trainer.evaluate()
        self._writers.write(step, step / self._trainer.steps_per_epoch, "eval", figures)
        if not math.isfinite(figures["loss"]):
            raise TrainingDiverged(
                f"training diverged by step {step:,}: the loss on the evaluation data is not "
                "finite. Lower the learning rate, or clip the gradient."
            )
        if self._plateau is not None and step % (self._run_plan.eval_every or 1) == 0:
            self._observe(self._plateau, step, figures)
        self._evaluated = (step, figures)
        if self._checkpoints.would_be_best(figures):
            self._save(step)

    def _observe(self, plateau: ReduceOnPlateau, step: int, figures: dict[str, float]) -> None:
        """Not to be called for an evaluation that is made only because the run ends there."""
        # All workers go by the chief's figure: the last bit of their own could differ.
        value = self._workers.figure_of_chief(figures[plateau.metric])
        best = plateau.state["best"].numpy()
        if plateau.observe(step, value):
            rate = learning_rate_at(self._trainer.optimizer, step)
            self._console.line(
                f"step {step:,}: {plateau.metric} {value:.6g} is no better than {best:.6g} before. "
                f"The learning rate goes on at {rate:.6g}."
            )

    def _save(self, step: int, scheduled: bool = True) -> None:
        self._trainer.check_finite()
        evaluated_at, figures = self._evaluated
        self._checkpoints.save(figures if evaluated_at == step else None, scheduled)

    def _stop_if_asked(self, step: int) -> None:
        """To be called when `Trainer.train` has returned: before its time it does so if asked."""
        if step >= self._total:
            return
        signal = self._stop.received.name if self._stop.received else "request"
        where = f"stopped by {signal} at step {step:,} of {self._total:,}"
        try:
            self._save(step, scheduled=False)
        except TrainingDiverged as error:
            # Started again it gets there again, and there is dealt with as the plan says.
            raise TrainingInterrupted(
                f"{where}, without saving: {error} The same command goes on from the last "
                "checkpoint."
            ) from error
        self._finish()
        raise TrainingInterrupted(f"{where}, after saving. The same command goes on from there.")

    def _finish(self) -> None:
        """Returns on all workers when the chief has written the last checkpoint, or on none."""
        with self._workers.failing_together():
            self._checkpoints.finish()

    def _rewind(self, error: TrainingDiverged) -> None:
        """Goes back to the last checkpoint and past the batch with which training diverged.

        All of this follows from the plan and the data, but for checkpoints that were damaged or
        could not be written: a run that is stopped or killed meanwhile does the same again.
        """
        trainer = self._trainer
        state, rewinds = trainer.state, int(trainer.state.rewinds)
        if rewinds >= self._run_plan.max_rewinds:
            raise TrainingDiverged(f"{error} It had gone back {rewinds} times before.") from error
        if self._checkpoints.restore_latest(scheduled=True) is None:
            raise TrainingDiverged(f"{error} There is no checkpoint to go back to.") from error
        first = int(trainer.state.batches)
        end = int(state.batches) - max(0, int(state.diverged_for) - 1)
        trainer.restore(trainer.state.leaving_out(end, rewinds + 1))
        self._writers.drop_after(trainer.step)
        self._console.line(
            f"{error}\nGoing back to step {trainer.step:,}, and leaving out the batches from "
            f"{first:,} to {end - 1:,}. Rewind {rewinds + 1} of {self._run_plan.max_rewinds}."
        )

    def _add_speed(self, figures: dict[str, float], steps_per_second: float | None) -> None:
        if steps_per_second is not None:
            figures["examples_per_second"] = steps_per_second * self._trainer.global_batch_size
