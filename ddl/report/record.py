"""Contents of a run's directory: state, metrics, config, starts and warnings."""

import dataclasses
import json
import math
import os
import re
from pathlib import Path
from typing import Any

from ddl.figures import DIGEST, REWINDS, SKIPPED_UPDATES
from ddl.output import FAILURES_FILE
from ddl.report.bindings import bindings, text_of
from ddl.report.curves import Curve
from ddl.report.files_of_run import is_locked, reason_of, text_in
from ddl.report.lines import Metrics
from ddl.report.profiles import profiles
from ddl.report.starts import Start, starts
from ddl.run.directory import MARK, sanity_mode_of
from ddl.run.timing import goodput
from ddl.run.timing.phase_times import PhaseTimes

_LARGEST_CONFIG, _LARGEST_JSON, _LARGEST_NOTE = 2**20, 2**22, 2000
_CHECKPOINT = re.compile(r"step-(\d+)\.index")


@dataclasses.dataclass
class Record:
    """A run, as its directory shows it.

    Attributes:
      path: The directory.
      state: In a few words: finished, training, stopped.
      sanity_mode: The sanity mode that wrote it, such as fast_run; None for a real run.
      warnings: Sentences on missing, damaged or unusual parts.
      curves: A curve for each split and figure.
      step: The largest step with metrics; None if there is none.
      epoch: The epoch of that step; None if unknown.
      total: Steps of the whole run; None if unknown.
      config: The text of the config; None if there is none that can be read.
      config_file: The name of its file.
      bindings: The bindings of the config.
      starts: The processes that trained, in order.
      profiles: Times by phase of each profile, by its name.
      life: The time of the run's whole life by kind of work; None if unknown.
      checkpoint: The newest checkpoint's step; None if there is none.
      metadata: Contents of that checkpoint's JSON file.
      logged_digests: The digest at each step of metrics.jsonl that has one.
      saved_digests: The digest of each checkpoint that has one.
      written: When a metric was last written, in seconds since 1970; None if never.
    """

    path: Path
    state: str = "empty"
    sanity_mode: str | None = None
    warnings: list[str] = dataclasses.field(default_factory=list)
    curves: dict[tuple[str, str], Curve] = dataclasses.field(default_factory=dict)
    step: int | None = None
    epoch: float | None = None
    total: int | None = None
    config: str | None = None
    config_file: str = "operative_config.gin"
    bindings: dict[str, str] = dataclasses.field(default_factory=dict)
    starts: list[Start] = dataclasses.field(default_factory=list)
    profiles: list[tuple[str, PhaseTimes]] = dataclasses.field(default_factory=list)
    life: goodput.Life | None = None
    checkpoint: int | None = None
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)
    written: float | None = None
    logged_digests: dict[int, str] = dataclasses.field(default_factory=dict)
    saved_digests: dict[int, str] = dataclasses.field(default_factory=dict)

    def last(self, name: str, split: str = "train") -> float:
        """Returns the last value of a figure; NaN if there is none."""
        curve = self.curves.get((split, name))
        return curve.last.value if curve else math.nan


def read(path: Path) -> Record:
    """Reads the directory of a run. Whatever is missing or damaged becomes a warning.

    Args:
      path: The directory. A run may be training there; it is not disturbed.
    """
    record = Record(path)
    try:
        names = sorted(os.listdir(path))
    except OSError as error:
        record.state = "unreadable"
        record.warnings.append(f"The directory cannot be read: {error.strerror}.")
        return record
    _read_config(record)
    _read_metrics(record)
    _read_checkpoints(record)
    try:
        record.life = goodput.read(path / goodput.NAME)
    except (OSError, ValueError) as error:
        record.warnings.append(f"{goodput.NAME} cannot be read: {reason_of(error)}.")
    record.profiles, faults = profiles(path)
    record.warnings += faults
    rewinds = record.last(REWINDS)
    record.starts = starts(path, 0 if math.isnan(rewinds) else int(rewinds))
    _judge(record, names)
    _mark(record)
    _warn(record)
    return record


def _read_config(record: Record) -> None:
    for name in ("operative_config.gin", "config.gin"):
        try:
            text = text_in(record.path / name, _LARGEST_CONFIG)
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            record.warnings.append(f"{name} cannot be read: {reason_of(error)}.")
            continue
        record.config, record.config_file = text, name
        record.bindings, fault = bindings(text, name)
        if fault is not None:
            record.warnings.append(
                f"Only the bindings before a fault in {name} are compared: {fault!s:.500}"
            )
        break
    total = text_of(record.bindings, "TOTAL_STEPS", "TRAIN_STEPS", "RunPlan.train_steps")
    if total is not None and re.fullmatch(r"\d{1,15}", total):
        record.total = int(total)


def _read_metrics(record: Record) -> None:
    path = record.path / "metrics.jsonl"
    try:
        metrics = Metrics(path)
        record.written = path.stat().st_mtime if metrics.lines else None
    except FileNotFoundError:  # no metrics, or removed meanwhile
        return
    except OSError as error:
        record.warnings.append(f"metrics.jsonl cannot be read: {reason_of(error)}.")
        return
    record.curves, record.logged_digests = metrics.curves, metrics.digests
    record.warnings += metrics.faults
    if metrics.lines:
        record.step = int(metrics.last_step)
        record.epoch = None if math.isnan(metrics.last_epoch) else metrics.last_epoch


def _read_checkpoints(record: Record) -> None:
    folder = record.path / "checkpoints"
    try:
        names = os.listdir(folder)
        damaged = os.listdir(folder / "damaged") if "damaged" in names else []
    except FileNotFoundError:
        return
    except OSError as error:
        record.warnings.append(f"checkpoints/ cannot be read: {reason_of(error)}.")
        return
    if damaged:
        some = ", ".join(sorted(damaged)[:5])
        record.warnings.append(f"Damaged checkpoints lie in checkpoints/damaged: {some}.")
    steps = [int(name[1]) for name in map(_CHECKPOINT.fullmatch, names) if name]
    if not steps:
        return
    record.checkpoint = max(steps)
    for step in sorted(steps):
        name = f"step-{step}.json"
        try:
            metadata = json.loads(text_in(folder / name, _LARGEST_JSON))
        except (OSError, ValueError, RecursionError) as error:
            if step == record.checkpoint:
                record.warnings.append(f"checkpoints/{name} cannot be read: {reason_of(error)}.")
            continue
        metadata = metadata if isinstance(metadata, dict) else {}
        if isinstance(digest := metadata.get(DIGEST), str):
            record.saved_digests[step] = digest
        if step == record.checkpoint:
            record.metadata = metadata


def _judge(record: Record, names: list[str]) -> None:
    """Sets the state of a run."""
    # A run may have a checkpoint of step 0, from before its first update.
    step = max(-1 if known is None else known for known in (record.step, record.checkpoint))
    of = f"step {step:,}" + (f" of {record.total:,}" if record.total is not None else "")
    metadata, at_checkpoint = record.metadata, record.checkpoint == step
    if is_locked(record.path):
        record.state = f"training: {of}" if step >= 0 else "training: nothing logged so far"
    elif step < 0:
        if not names:
            record.state, why = "empty", "The directory is empty."
        elif record.config is not None:
            record.state, why = "not begun", "There is a config, but neither metric nor checkpoint."
        else:
            record.state = "unreadable" if record.warnings else "no run"
            why = "There is no config, metric or checkpoint that can be read."
            if runs := [each for each in names if _holds_run(record.path / each)]:
                more = ", …" if len(runs) > 5 else ""
                why += f" It contains runs: {', '.join(runs[:5])}{more}. Pass those."
        record.warnings.append(why)
    elif at_checkpoint and metadata.get("ended_by"):
        record.state = f"ended early by {metadata['ended_by']!s:.80}: {of}"
    elif record.total is None:
        record.state = f"ended, or waits to be resumed: {of}"
    elif step >= record.total:
        record.state = f"finished: {of}"
    elif at_checkpoint and metadata.get("scheduled") is False:
        record.state = f"stopped on a signal after saving: {of}"
    else:
        record.state = f"unfinished: {of}"


def _mark(record: Record) -> None:
    """Marks the state of a run of a sanity mode."""
    try:
        mode = sanity_mode_of(record.path)
    except OSError as error:
        record.warnings.append(f"{MARK} cannot be read: {reason_of(error)}.")
        return
    if mode is not None:
        record.sanity_mode = mode
        record.state = f"no real run, by --{mode:.40}: {record.state}"


def _holds_run(path: Path) -> bool:
    try:
        return any((path / name).exists() for name in ("metrics.jsonl", "operative_config.gin"))
    except OSError:
        return False


def _warn(record: Record) -> None:
    """Adds the warnings that need several files."""
    begun = record.step is not None or record.checkpoint is not None
    if begun and record.config is None:
        record.warnings.append("There is no config. A run from Python (ddl.fit) writes none.")
    elif begun and record.config_file == "config.gin":
        record.warnings.append(
            "There is no operative_config.gin: the config shows what was bound, not all that was "
            "used."
        )
    if record.checkpoint is not None and record.step is None:
        record.warnings.append("There are checkpoints, but no metrics in metrics.jsonl.")
    for name, what in (
        (REWINDS, "Training diverged and was rewound to a checkpoint: {} so far."),
        (SKIPPED_UPDATES, "Updates skipped after an overflow of the gradients: {}."),
    ):
        number = record.last(name)
        if number > 0:
            record.warnings.append(what.format(f"{number:,.0f}"))
    if (restarts := len(record.starts) - 1) > 0:
        often = "once" if restarts == 1 else f"{restarts:,} times"
        at = [f"{start.step:,}" for start in record.starts[1:] if start.step is not None]
        some = f" First logs after a restart: step {', '.join(at[:20])}" if at else ""
        more = ", …" if len(at) > 20 else ""
        record.warnings.append(f"Restarted at least {often}.{some}{more}{'.' if at else ''}")
    try:
        note = text_in(record.path / FAILURES_FILE, _LARGEST_NOTE, cut=True)
        record.warnings.append(f"{FAILURES_FILE}: {note.strip()}")
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        record.warnings.append(f"{FAILURES_FILE} cannot be read: {reason_of(error)}.")
    for split in ("train", "eval"):
        damaged = list((record.path / split).glob("events.out.damaged.*"))
        if damaged:
            files = "file" if len(damaged) == 1 else "files"
            record.warnings.append(f"{split}/ has {len(damaged)} damaged event {files}.")
