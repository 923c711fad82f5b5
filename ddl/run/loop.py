"""The outer loop of a run: logs, evaluations, checkpoints and rewinds between device loops."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress

from ddl.callbacks.calling import Calls
from ddl.callbacks.early_stopping import Evaluations
from ddl.callbacks.moment import MediaWriter
from ddl.checkpoints.checkpoints import Checkpoints
from ddl.distribution.workers import Workers
from ddl.errors import ModelDirectoryError, TrainingDiverged, TrainingInterrupted
from ddl.figures import EXAMPLES_PER_SECOND, LOSS_SCALE, REWINDS, SKIPPED_UPDATES
from ddl.optimizers.groups import ONLY, by_name, frozen_until
from ddl.optimizers.learning_rate import learning_rate_at
from ddl.optimizers.loss_weight import loss_weights
from ddl.optimizers.plateau import ReduceOnPlateau, plateaus_of
from ddl.run.checks.learning_rate import constant_rates, report_restored_rates
from ddl.run.console import RunConsole
from ddl.run.directory import NoCheckpoints
from ddl.run.plan import RunPlan
from ddl.run.profiling import Profiler
from ddl.run.writers import Writers
from ddl.signals import StopSignals
from ddl.training.actions import Action, EachLoop, Periodic
from ddl.training.pace import Monitor
from ddl.training.trainer import Trainer


class OuterLoop:
    """Trains to the end of the run; logs, evaluates, saves and rewinds as the run plan says.

    Use it on all workers, in eager, cross-replica context.
    """

    def __init__(
        self,
        trainer: Trainer,
        run_plan: RunPlan,
        checkpoints: Checkpoints | NoCheckpoints,
        writers: Writers,
        console: RunConsole,
        stop: StopSignals | None,
        evaluates: bool,
        evaluations: Evaluations | None = None,
        actions: Sequence[Action] = (),
        media: MediaWriter | None = None,
        profiler: Profiler | None = None,
        monitor: Monitor | None = None,
    ):
        """Keeps the parts of a run and schedules the actions.

        Args:
          trainer: The trainer, newly built or restored.
          run_plan: Length of the run, and periods of its actions.
          checkpoints: The checkpoints of this trainer.
          writers: Receive the metrics.
          console: Shows progress.
          stop: Holds the signal that asked to stop, if any.
          evaluates: Whether the run evaluates.
          evaluations: The earlier evaluations, if the run may end early.
          actions: Further actions, called after the evaluations and before a checkpoint.
          media: Receives the images, texts and histograms of callbacks; None writes none.
          profiler: Profiles some of the updates; None profiles none.
          monitor: Measures waits for input and GPUs; None measures nothing.
        """
        self._trainer = trainer
        self._run_plan = run_plan
        self._total = run_plan.total_steps(trainer.steps_per_epoch)
        self._checkpoints = checkpoints
        self._writers = writers
        self._console = console
        self._stop = stop
        self._plateaus = plateaus_of(trainer.optimizer)
        self._frozen_until = frozen_until(trainer.optimizer)
        self._workers = Workers(trainer.strategy)
        self._examples_per_step = sum(
            one.global_batch_size * one.batches_per_update for one in trainer.pipelines.values()
        )
        self._early = evaluations
        self._evaluated: tuple[int, dict[str, float]] = (-1, {})
        self._logged: tuple[int, dict[str, float]] = (-1, {})
        self._best_step = -1  # step of an evaluation that is the best so far
        self._calls = Calls(run_plan.calls, trainer, media, self._write, self._training_figures)
        last = self._total
        evaluated_every = [run_plan.eval_every] if evaluates else []
        periodic = [Periodic(every, self._evaluate, last) for every in evaluated_every]
        self._profiler = profiler
        self._monitor = monitor
        # The checkpoint comes last: once a step is saved, its logs are already written.
        self._actions: list[Action] = [
            *([] if profiler is None else [profiler.ending]),
            EachLoop(self._show_progress),
            Periodic(run_plan.log_every, self._log, last),
            *periodic,
            *actions,
            *self._calls.actions,
            EachLoop(self._save_if_best),
            Periodic(run_plan.checkpoint_every, self._save, last),
            *([] if profiler is None else [profiler.beginning]),
        ]

    def run(self) -> None:
        """Trains to the end, or to an early one; returns when the last checkpoint is on disk.

        Raises:
          TrainingInterrupted: If a signal asked to stop. The step is saved first, unless a weight,
            a slot, a statistic or an average is not finite.
          TrainingDiverged: If training diverged and the run cannot rewind: the plan says `stop`,
            `max_rewinds` is reached, or there is no checkpoint.
          ModelDirectoryError: If the last checkpoint could not be written, or the checkpoint to
            rewind to cannot be restored.
        """
        trainer = self._trainer
        end = self._total
        self._console.start(trainer.step, self._total)
        if self._run_plan.on_divergence == "rewind" and not self._checkpoints.has_any():
            self._save(trainer.step)  # a rewind needs a checkpoint
        try:
            while trainer.step < end:
                if self._profiler is not None:
                    self._profiler.begin_if_due(trainer.step)
                try:
                    trainer.train(end - trainer.step, self._actions, progress=False)
                    if self._ends_early(trainer.step):
                        break
                    if trainer.step < end:
                        self._stop_as_asked(trainer.step)
                except TrainingDiverged as error:
                    if self._run_plan.on_divergence == "stop":
                        raise
                    if self._profiler is not None:
                        self._profiler.end(trainer.step)
                    self._rewind(error)
            self._finish()
        finally:
            if self._profiler is not None:
                self._profiler.end()
            with suppress(ModelDirectoryError):  # already reported
                self._checkpoints.finish()

    def _show_progress(self, step: int) -> None:
        if self._console.shows_progress:
            figures = self._trainer.peek_metrics()
            self._add_speed(figures, self._trainer.pace.steps_per_second)
            self._console.advance(step, figures)

    def _log(self, step: int) -> None:
        trainer = self._trainer
        figures = trainer.read_metrics()
        figures |= trainer.learning_rates
        figures |= loss_weights(trainer.task, step)
        if trainer.loss_scale is not None:
            figures[LOSS_SCALE] = trainer.loss_scale
            figures[SKIPPED_UPDATES] = trainer.skipped_updates
        if rewinds := int(trainer.state.rewinds):
            figures[REWINDS] = rewinds
        self._add_speed(figures, trainer.pace.take_steps_per_second())
        self._logged = (step, figures)
        if self._monitor is not None:
            figures = figures | self._monitor.figures()
        self._write(step, "train", figures)

    def _write(self, step: int, split: str, figures: Mapping[str, float]) -> None:
        self._writers.write(step, self._trainer.epoch_at(step), split, figures)

    def _training_figures(self) -> Mapping[str, float]:
        """Returns the figures that were logged at this step, or else those since the last log."""
        step, figures = self._logged
        return figures if step == self._trainer.step else self._trainer.peek_metrics()

    def _evaluate(self, step: int) -> None:
        figures = self._trainer.evaluate()
        self._write(step, "eval", figures)
        if not math.isfinite(figures["loss"]):
            raise TrainingDiverged(
                f"Training diverged by step {step:,}: the loss on the evaluation data is not "
                "finite. Lower the learning rate, or clip the gradient."
            )
        if step % (self._run_plan.eval_every or 1) == 0:
            for name, plateau in self._plateaus.items():
                if step > self._frozen_until[name] or not self._frozen_until[name]:
                    self._observe(name, plateau, step, figures)
            if self._early is not None:
                self._early.add(step, figures[self._early.rule.metric])
                # All workers do as the chief: their own figures could differ in the last bit.
                if step < self._total and self._workers.broadcast(self._early.are_over):
                    self._calls.stop()
        self._evaluated = (step, figures)
        if self._checkpoints.would_be_best(figures):
            self._best_step = step
        self._calls.after_evaluation(figures)

    def _save_if_best(self, step: int) -> None:
        """Saves after the best evaluation so far, with what actions and callbacks changed since."""
        if step == self._best_step:
            self._save(step)

    def _observe(
        self, name: str, plateau: ReduceOnPlateau, step: int, figures: dict[str, float]
    ) -> None:
        """Passes a metric to the plateau, and prints a reduction of the learning rate.

        Not called for an evaluation that is due only to the end of the run.
        """
        # All workers use the chief's value: their own could differ in the last bit.
        value = self._workers.broadcast_float(figures[plateau.metric])
        best = plateau.state["best"].numpy()
        optimizer = by_name(self._trainer.optimizer)[name]
        made = int(optimizer.iterations.numpy())  # an own step may update more or less often
        if plateau.observe(made, value):
            rate, of = learning_rate_at(optimizer, made), "" if name == ONLY else f" of {name}"
            self._console.line(
                f"Step {step:,}: {plateau.metric} {value:.6g} does not improve on {best:.6g}. "
                f"The learning rate{of} is reduced to {rate:.6g}."
            )

    def _save(self, step: int, scheduled: bool = True) -> None:
        evaluated_at, figures = self._evaluated
        figures = figures if evaluated_at == step else {}
        self._trainer.check_finite()
        saved = self._checkpoints.save(figures, scheduled, self._calls.ending())
        if saved and self._calls.follow_saves and (path := self._checkpoints.written()):
            self._calls.after_save(path)

    def _ends_early(self, step: int) -> bool:
        """Saves and returns True if the evaluations or a callback end the run."""
        if step >= self._total:  # the same on all workers, unlike a signal
            return False
        if self._early is not None and self._workers.broadcast(self._early.are_over):
            self._save(step)
            self._console.line(f"The run ends early at step {step:,}: {self._early}.")
            return True
        if self._calls.ending() is None:
            return False
        self._save(step)
        self._console.line(f"The run ends early at step {step:,}: {self._calls.reason}.")
        return True

    def _stop_as_asked(self, step: int) -> None:
        """Saves and raises TrainingInterrupted, after `Trainer.train` returned early on request."""
        signal = self._stop.received.name if self._stop and self._stop.received else "request"
        where = f"Training stopped on {signal} at step {step:,} of {self._total:,}"
        try:
            self._save(step, scheduled=False)
        except TrainingDiverged as error:
            # A resumed run diverges again; `on_divergence` decides then.
            raise TrainingInterrupted(
                f"{where}, without saving: {error} Run the same command to resume from the last "
                "checkpoint."
            ) from error
        self._finish()
        if isinstance(self._checkpoints, NoCheckpoints):
            raise TrainingInterrupted(
                f"{where}. Nothing is saved without a model directory. The Trainer can train on."
            )
        raise TrainingInterrupted(f"{where}, after saving. Run the same command to resume.")

    def _finish(self) -> None:
        """Waits for the chief's last write; raises on all workers if it failed."""
        with self._workers.failing_together():
            self._checkpoints.finish()

    def _rewind(self, error: TrainingDiverged) -> None:
        """Restores the last scheduled checkpoint; skips the batches through the diverging one.

        The rewind is a function of plan and data, unless a checkpoint was damaged or could not be
        written. A run that is stopped or killed during a rewind repeats it when it resumes.
        """
        trainer = self._trainer
        state, rewinds = trainer.state, int(trainer.state.rewinds)
        if rewinds >= self._run_plan.max_rewinds:
            raise TrainingDiverged(
                f"{error} The run has already made {rewinds} rewinds, as many as "
                "RunPlan.max_rewinds allows."
            ) from error
        rates = constant_rates(trainer.optimizer)
        restored = self._checkpoints.restore_latest(scheduled=True)
        if restored is None:
            raise TrainingDiverged(f"{error} There is no checkpoint to rewind to.") from error
        first = int(trainer.state.batches)
        end = int(state.batches) - max(0, int(state.diverged_for) - 1)
        trainer.restore(trainer.state.skipping_to(end, rewinds + 1))
        self._writers.drop_after(trainer.step)
        self._evaluated, self._logged, self._best_step = (-1, {}), (-1, {}), -1
        self._calls.forget_end()
        if self._stop is not None and self._stop.received:
            trainer.request_stop()  # the signal's own request may have been dropped too
        if self._early is not None:
            self._early.drop_after(trainer.step)
        self._console.line(
            f"{error}\nThe run rewinds to step {trainer.step:,} and skips the batches {first:,} to "
            f"{end - 1:,}. This is rewind {rewinds + 1} of {self._run_plan.max_rewinds}."
        )
        report_restored_rates(rates, trainer.optimizer, self._console.line)

    def _add_speed(self, figures: dict[str, float], steps_per_second: float | None) -> None:
        if steps_per_second is not None:
            figures[EXAMPLES_PER_SECOND] = steps_per_second * self._examples_per_step
