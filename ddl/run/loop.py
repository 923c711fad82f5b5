"""The loop of a run: logs, evaluations, checkpoints and callbacks between device loops."""

import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import NoReturn

import tensorflow as tf

from ddl.distribution.workers import Workers
from ddl.errors import ConfigError, ModelDirectoryError, TrainingDiverged, TrainingInterrupted
from ddl.figures import (
    EXAMPLES_PER_SECOND,
    GPU_UTILIZATION,
    LOSS_SCALE,
    SKIPPED_UPDATES,
    is_measured,
)
from ddl.optimizers.loss_weight import loss_weights
from ddl.run import callbacks
from ddl.run.plan import Files, RunPlan
from ddl.run.trackers import TrackerWriter
from ddl.run.writers import RunConsole, Writer, is_interactive
from ddl.signals import StopSignals
from ddl.training.runner import AfterLoop
from ddl.training.trainer import Trainer

_NEVER = 2**62  # a step beyond all runs


class Periodic:
    """Calls a function at every multiple of a number of steps, and at the last step.

    No training loop runs past such a step. The schedule depends only on the step: a resumed run
    calls the function at the same steps as an uninterrupted run.
    """

    def __init__(self, every: int | None, function: AfterLoop, last: int):
        """Keeps the schedule.

        Args:
          every: Steps between calls, at least 1; None calls at the last step only.
          function: Called with the step.
          last: The last step of the run.
        """
        self._every = every or max(last, 1)
        self._function = function
        self._last = last

    def next_step(self, step: int) -> int:
        """Returns the first step after `step` at which the function is called."""
        return min(self._last, (step // self._every + 1) * self._every)

    def __call__(self, step: int) -> None:
        """Calls the function if it is due at `step`."""
        if step == self._last or step % self._every == 0:
            self._function(step)


@dataclasses.dataclass
class Run:
    """A run that trains. Eager, cross-replica context, on all workers.

    Attributes:
      trainer: The trainer.
      plan: Length of the run, and its periods.
      files: Files that the run writes and resumes from; None writes nothing.
      console: Shows progress and lines.
      evaluates: Whether the run evaluates.
      profile: The step to begin a profile after, and its last step; None profiles nothing.
      stop: Holds the signal that asked to stop, if any.
    """

    trainer: Trainer
    plan: RunPlan
    files: Files | None
    console: RunConsole
    evaluates: bool
    profile: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        trainer = self.trainer
        self.stop = StopSignals(trainer.request_stop, may_end=not is_interactive())
        self._workers = Workers(trainer.strategy)
        self._checkpoints = None if self.files is None else self.files.checkpoints
        self._total = self.plan.total_steps(trainer)
        if self.profile and not 0 <= self.profile[0] < self.profile[1] <= self._total:
            raise ConfigError(
                "profile must be two steps of the run, the smaller one first, such as (100, 110), "
                f"got {self.profile!r:.60} for {self._total:,} steps."
            )
        self._profile = Profile(self.files, self.profile, trainer, self.console.line)
        self._writers: list[Writer] = []
        # The latest figures, with their step.
        self._evaluated: tuple[int, dict[str, float]] = (-1, {})
        self._logged: tuple[int, dict[str, float]] = (-1, {})

    def train(
        self,
        compare: Callable[[], None] | None = None,
        opened: Callable[[], None] | None = None,
        remedy: str = "Raise TRAIN_STEPS or TRAIN_EPOCHS to train longer.",
    ) -> None:
        """Resumes the run or begins it, and trains to its end, its early end or a stop.

        In the main thread, SIGTERM and SIGINT meanwhile ask to stop.

        Args:
          compare: Compares the settings with those of the run so far, before a checkpoint is
            restored. On the chief.
          opened: Writes these settings when the directory is created and locked. On the chief.
          remedy: Remedy for a run that has reached its end already.

        Raises:
          TrainingInterrupted: If a signal asked to stop. The step is saved first, unless a weight,
            a slot, a statistic or an average is not finite.
          TrainingDiverged: If training diverged.
          ModelDirectoryError: If the directory cannot be used, settings differ, a checkpoint cannot
            be restored, or the last one cannot be written.
          DdlError: For other errors that the user can fix.
        """
        trainer, files = self.trainer, self.files
        with ExitStack() as stack:
            stack.callback(trainer.withdraw_stop)
            stack.enter_context(self.stop)
            # ---------------------------------------------------------- resume
            if files is not None:
                stack.callback(files.directory.release)
                with self._workers.failing_together():
                    if self._workers.is_chief:
                        files.directory.claim()
                        any(False for _ in files.json_lines.rows())  # checks each line
                        if compare is not None and files.checkpoints.saved():
                            compare()
            self._restore()
            is_at = f"The run has reached step {trainer.step:,} of {self._total:,}"
            if trainer.step >= self._total:
                self.console.line(f"{is_at}. {remedy}")
                return
            if reason := self._reason_to_end():
                self.console.line(f"{is_at} and ended early: {reason}.")
                return
            trainer.trace()
            # ---------------------------------------------------------- open the files
            if files is not None:
                files.checkpoints.check()
                stack.callback(files.events.close)
                with self._workers.failing_together():
                    if self._workers.is_chief:
                        files.directory.open()
                        if opened is not None:
                            opened()
                        files.json_lines.drop_after(trainer.step)
                        split = "eval" if self.evaluates else "train"
                        files.events.session(split, files.directory)
                        self._writers = [files.json_lines, files.events]
            if self._workers.is_chief:
                for tracker in self.plan.trackers:
                    directory = None if files is None else files.directory
                    writer = TrackerWriter(tracker, directory, self.console.line)
                    stack.callback(writer.close)
                    self._writers.append(writer)
            # ---------------------------------------------------------- train
            stack.callback(self.console.close)
            self._loop()
        where = "" if files is None else f", written to {files.directory.path}"
        seconds = trainer.pace.total_seconds
        self.console.line(f"Done: step {trainer.step:,} after {seconds:,.1f} s of training{where}.")

    def _restore(self) -> None:
        """Restores the newest checkpoint with the figures so far, or else applies the warm start.

        A trainer that saved or restored this checkpoint last is kept as it is: a learning rate that
        was assigned since then takes effect, as it does without files.
        """
        trainer, saved, before = self.trainer, None, self.trainer.state
        if self._checkpoints is not None:
            saved = self._checkpoints.restore_latest(keeps=True)
        if saved is None and trainer.step == 0:
            warm_start(trainer, self.plan, self.console)
        elif saved is not None and trainer.state is before:
            self.console.line(f"Continuing at step {trainer.step:,}, which the trainer saved.")
        elif saved is not None:
            rates = ", ".join(f"{name} {rate:.6g}" for name, rate in trainer.learning_rates.items())
            self.console.line(
                f"Resuming step {trainer.step:,} of an earlier run, from {saved}, at {rates}."
            )
        if self.files is not None and not (trainer.history and trainer.state is before):
            trainer.history.clear()
            trainer.history.add(
                {name: value for name, value in row.items() if not is_measured(name)}
                for row in self.files.json_lines.rows()
                if row["step"] <= trainer.step and row.get("split") in ("train", "eval")
            )

    def _loop(self) -> None:
        """Trains to the end, or to an early one; returns when the last checkpoint is on disk."""
        trainer, plan = self.trainer, self.plan
        # The checkpoint comes last: once a step is saved, its logs are already written.
        every = plan.of(callbacks.Every)
        after_loop: list[AfterLoop] = [
            self._profile,
            partial(self.console.advance, figures=self._progress),
            Periodic(plan.log_every, self._log, self._total),
            *([Periodic(plan.eval_every, self._evaluate, self._total)] if self.evaluates else []),
            *(Periodic(one.steps, partial(self._call_every, one), _NEVER) for one in every),
            self._save_if_best,
            Periodic(plan.checkpoint_every, self._save, self._total),
            self._profile.begin,
        ]
        self.console.start(trainer.step, self._total)
        self._profile.begin(trainer.step)
        try:
            trainer.train(self._total - trainer.step, after_loop, progress=False)
            if trainer.step < self._total:
                if not (reason := self._reason_to_end()):
                    self._stop_as_asked(trainer.step)
                self.console.line(f"The run ends early at step {trainer.step:,}: {reason}.")
                self._save(trainer.step)
            self._finish()
        finally:
            self._profile.end(trainer.step)
            with suppress(ModelDirectoryError):  # already reported
                if self._checkpoints is not None:
                    self._checkpoints.finish()

    def _progress(self) -> dict[str, float]:
        return self.trainer.peek_metrics() | self._speed(self.trainer.pace.steps_per_second)

    def _log(self, step: int) -> None:
        trainer = self.trainer
        figures = trainer.read_metrics() | trainer.learning_rates
        figures |= loss_weights(trainer.task, step)
        if trainer.loss_scale is not None:
            figures[LOSS_SCALE] = trainer.loss_scale
            figures[SKIPPED_UPDATES] = trainer.skipped_updates
        speed, waits = trainer.pace.take()
        figures |= self._speed(speed)
        self._logged = (step, figures)
        self._write(step, "train", figures | waits | gpu_utilization())

    def _speed(self, steps_per_second: float | None) -> dict[str, float]:
        sources = self.trainer.pipelines.values()
        examples = sum(one.global_batch_size * one.batches_per_update for one in sources)
        return {EXAMPLES_PER_SECOND: steps_per_second * examples} if steps_per_second else {}

    def _write(self, step: int, split: str, figures: Mapping[str, float]) -> None:
        """Writes figures; those of the machine are neither printed nor in the history."""
        epoch = self.trainer.epoch_at(step)
        for writer in self._writers:
            writer.write(step, epoch, split, figures)
        shown = {name: value for name, value in figures.items() if not is_measured(name)}
        # As a resumed run reads the lines: the first of two figures of one name stays.
        self.trainer.history.add([{"step": step, "epoch": epoch, "split": split, **shown}])
        self.console.write(step, epoch, split, shown)

    def _evaluate(self, step: int) -> None:
        figures = self.trainer.evaluate()
        self._write(step, "eval", figures)
        if not math.isfinite(figures["loss"]):
            what = f"Training diverged by step {step:,}: the loss of the evaluation is not finite"
            remedy = "Lower the learning rate, clip the gradient, or check the evaluation data."
            raise TrainingDiverged(f"{what}. {remedy}")
        if step < self._total and self._reason_to_end():
            self.trainer.request_stop()
        self._evaluated = (step, figures)
        for callback in self.plan.of(callbacks.AfterEvaluation):
            self.call(callback, "eval", figures)

    def _call_every(self, callback: callbacks.Callback, step: int) -> None:
        self.call(callback)

    def call(
        self,
        callback: callbacks.Callback,
        split: str = "train",
        figures: Mapping[str, float] | None = None,
        checkpoint: Path | None = None,
    ) -> None:
        """Calls a callback, checks its changes, and logs its figures.

        Args:
          callback: The callback.
          split: The split of its figures and summaries, `train` or `eval`.
          figures: Loss and metrics of the moment; None takes those logged at this step, or else
            those since the last log.
          checkpoint: Path of the checkpoint of an `AfterSave`.

        Raises:
          ConfigError: As `Callback` and `checked_changes`.
        """
        if figures is None:
            step, logged = self._logged
            figures = logged if step == self.trainer.step else self.trainer.peek_metrics()
        trainer, is_chief = self.trainer, self._workers.is_chief
        epoch = trainer.epoch_at(trainer.step)
        event = callbacks.Event(trainer, trainer.step, epoch, is_chief, dict(figures), checkpoint)
        events = self.files.events if self.files is not None and is_chief else None
        with (
            callbacks.checked_changes(callback, event),
            nullcontext() if events is None else events.summaries(split, event.step),
        ):
            values = callback(event)
        if values:
            self._write(trainer.step, split, values)

    def _save_if_best(self, step: int) -> None:
        """Saves after the best evaluation so far, with what callbacks changed since."""
        evaluated_at, figures = self._evaluated
        saved = self._checkpoints if step == evaluated_at else None
        if saved is not None and saved.would_be_best(figures):
            self._save(step)

    def _save(self, step: int) -> None:
        self.trainer.check_finite()
        if self._checkpoints is None:
            return
        evaluated_at, figures = self._evaluated
        saved = self._checkpoints.save(figures if evaluated_at == step else {})
        after = self.plan.of(callbacks.AfterSave)
        if saved and after and (path := self._checkpoints.written()):
            for callback in after:
                self.call(callback, checkpoint=path)

    def _reason_to_end(self) -> str:
        """Returns why the run ends early, on all workers as on the chief; "" if it does not."""
        history, every = self.trainer.history, self.plan.eval_every or 1
        rules = self.plan.of(callbacks.EarlyStopping) if self.evaluates else []
        reason = "; ".join(filter(None, (rule.reason_to_end(history, every) for rule in rules)))
        ends = bool(rules) and self._workers.broadcast(bool(reason))
        return (reason or "as on the chief") if ends else ""

    def _stop_as_asked(self, step: int) -> NoReturn:
        """Saves and raises TrainingInterrupted, after `Trainer.train` returned early on request."""
        signal = self.stop.received.name if self.stop.received else "request"
        how = "after saving" if self.files is not None else "without a directory to save to"
        try:
            self._save(step)
        except TrainingDiverged as error:  # a resumed run diverges again
            how = f"without saving: {error}"
        self._finish()
        what = f"Training stopped on {signal} at step {step:,} of {self._total:,}, {how}"
        raise TrainingInterrupted(f"{what}. Run the same command to resume.")

    def _finish(self) -> None:
        """Waits for the chief's last write; raises on all workers if it failed."""
        if self._checkpoints is not None:
            with self._workers.failing_together():
                self._checkpoints.finish()


def warm_start(trainer: Trainer, run_plan: RunPlan, console: RunConsole) -> None:
    """Applies the plan's warm start, if any, and prints the matches.

    Raises:
      ConfigError: As `WarmStart.apply` does.
      ModelDirectoryError: As `WarmStart.apply` does, or if workers read different checkpoints.
    """
    if (start := run_plan.warm_start) is None:
        return
    if trainer.model is None:
        raise ConfigError("WarmStart needs a task with a `model`. Remove RunPlan.warm_start.")
    workers = Workers(trainer.strategy)
    with workers.failing_together():  # the chief chooses: a run may write newer ones meanwhile
        chosen = start.find().prefix if workers.is_chief else ""
    start = dataclasses.replace(start, checkpoint=workers.gather_texts(chosen)[0])
    with workers.failing_together():
        report = start.apply(trainer.model, trainer.averages)
    if len(read := {one.partition(". ")[0] for one in workers.gather_texts(report)}) > 1:
        workers.barrier()
        raise ModelDirectoryError(f"All workers must read one checkpoint, got {read}. Share it.")
    console.line(report)


class Profile:
    """A profile of a range of updates, which ends loops at both ends of the range.

    Use it on all workers, in eager, cross-replica context. Each worker writes the profile of its
    own devices. The loops meanwhile do not count for the speed. A failure of the profiler is
    reported and does not end the run.
    """

    def __init__(
        self,
        files: Files | None,
        steps: tuple[int, int] | None,
        trainer: Trainer,
        report: Callable[[str], None],
    ):
        """Keeps the arguments; profiles nothing yet.

        Args:
          files: The files of the run; without any, there is no profile.
          steps: The step to begin after and the last step to profile; None profiles nothing.
          trainer: The trainer.
          report: Prints a line.
        """
        self._steps = (-1, -1) if steps is None or files is None else steps
        self._folder = Path() if files is None else files.directory.path / "profile"
        workers = Workers(trainer.strategy)
        if workers.number > 1:
            self._folder /= f"worker-{workers.index}"
        self._pace, self._report, self._runs = trainer.pace, report, False
        self._has_failed = False

    def begin(self, step: int) -> None:
        """Begins the profile if it is due before the next loop."""
        if not (self._runs or self._has_failed) and self._steps[0] <= step < self._steps[1]:
            level = 2 if tf.config.get_visible_devices("GPU") else 3  # on CPUs all operations
            options = tf.profiler.experimental.ProfilerOptions(host_tracer_level=level)
            # TensorFlow names a profile by the second, and would overwrite an earlier one.
            folder = str(self._folder / f"after-step-{step}")
            self._runs = self._try(tf.profiler.experimental.start, folder, options)
            self._pace.counts = not self._runs

    def next_step(self, step: int) -> int | None:
        """Returns the next end of the range. The same on all workers, unlike a request."""
        return next((one for one in self._steps if one > step), None)

    def __call__(self, step: int) -> None:
        """Ends the profile if it is due."""
        if step >= self._steps[1]:
            self.end(step)

    def end(self, step: int) -> None:
        """Writes the profile in progress, if there is one; `step` is the one reached."""
        if self._runs and self._try(tf.profiler.experimental.stop):
            self._report(f"The profile up to step {step:,} is in {self._folder}, for TensorBoard.")
        self._runs, self._pace.counts = False, True

    def _try(self, call: Callable[..., None], *arguments: object) -> bool:
        """Returns whether a call succeeded; after a failure there are no further calls."""
        try:
            call(*arguments)
        except (tf.errors.OpError, OSError) as error:
            self._has_failed = True  # the steps stay: loops end together on all workers
            self._report(f"There is no profile: {error!s:.200} Training continues.")
            return False
        return True


def gpu_utilization() -> dict[str, float]:
    """Returns the share of the last moments in which each GPU was busy, as "gpu_utilization/N".

    GPUs that cannot be measured are missing; all are without the package nvidia-ml-py.
    """
    found, visible = {}, os.environ.get("CUDA_VISIBLE_DEVICES")
    for device in tf.config.get_visible_devices("GPU"):
        with suppress(Exception):  # not installed, no driver, or a part of a GPU, without rates
            import pynvml

            pynvml.nvmlInit()
            number = int(device.name.rpartition(":")[2])
            name = str(number) if visible is None else visible.split(",")[number].strip()
            by_index, by_uuid = pynvml.nvmlDeviceGetHandleByIndex, pynvml.nvmlDeviceGetHandleByUUID
            handle = by_index(int(name)) if name.isdecimal() else by_uuid(name)
            busy = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu
            found[f"{GPU_UTILIZATION}/{number}"] = busy / 100
    return found
