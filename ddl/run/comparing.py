"""Comparison of a run's config with that of the other workers, and with that of the run so far."""

import hashlib
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import ddl
from ddl import config
from ddl.checkpoints.directory import file_errors
from ddl.config.registry import user_packages
from ddl.distribution.workers import Workers
from ddl.errors import ConfigError, ModelDirectoryError
from ddl.optimizers.groups import ONLY, by_name
from ddl.run.directory import RunDirectory, read_values
from ddl.tasks.parts import attributes_of, layers_of
from ddl.training.trainer import Trainer

# A resumed run may change what these own, which leaves its updates the same. Any other difference
# makes it another run.
_OWNERS = {"RunPlan", "Retention", "WarmStart", "Predictions", "MLflow"}
_OWNERS |= {"WeightsAndBiases", "Every", "AfterEvaluation", "AfterSave", "EarlyStopping"}
_OWNERS |= {"steps_per_epoch"}  # which follows from what the checkpoint compares
_PLAN = ("TRAIN_STEPS/", "EVAL_EVERY/", "CHECKPOINT_EVERY/", "LOG_EVERY/")  # scopes of macros
_PARAMETERS = {"data_dir", "files", "folder", "path", "paths", "pattern", "remat"}  # of the data
_MICROBATCHES = "Trainer.accumulation_steps"
_UNSET = "not set"


def check_same_on_all(workers: Workers, flags: Mapping[str, object]) -> None:
    """Compares code, versions, config and flags of all workers, and a seed that the config binds.

    Eager, cross-replica context, on all workers, before training.

    Args:
      workers: The workers of the run.
      flags: Values by name of the flags that must agree, such as the mode.

    Raises:
      ConfigError: On all workers, with the differing lines, if a worker differs from worker 0.
    """
    if workers.number == 1:
        return
    given = [f"--{name}={value}" for name, value in flags.items()]
    texts = workers.gather_texts("\n".join([*_versions(), *given, config.config_text()]))
    for index, text in enumerate(texts[1:], start=1):
        here, there = texts[0].splitlines(), text.splitlines()
        if differ := sorted({*here} ^ {*there}):
            listing = "\n".join(
                f"  {'worker 0' if line in here else f'worker {index}'}: {line}" for line in differ
            )
            workers.barrier()
            raise ConfigError(
                f"Worker {index} must have the code, versions, config and flags of worker 0, got\n"
                f"{listing}\nStart all workers with the same ones."
            )


def _versions() -> list[str]:
    """Returns library versions, and digests of the code of ddl and of the config's items."""
    digests = {name: hashlib.sha256() for name in {"ddl"} | user_packages()}
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name.partition(".")[0] in digests and file and Path(file).is_file():
            digests[name.partition(".")[0]].update(Path(file).read_bytes())
    return [
        f"ddl {ddl.__version__}, Python {sys.version_info[:2]}",
        f"TensorFlow {tf.__version__}, Keras {keras.__version__}, NumPy {np.__version__}",
        *(f"{name}, code {digest.hexdigest()[:12]}" for name, digest in sorted(digests.items())),
    ]


def compare_with_saved_config(
    directory: RunDirectory, trainer: Trainer, report: Callable[[str], None]
) -> None:
    """Compares the loaded config with the one saved in the directory, before a run resumes.

    Length, periods, retention, predictions, callbacks, trackers, warm start, paths of data, remat
    and microbatches may differ.

    Args:
      directory: The directory of the run.
      trainer: The built trainer.
      report: Called with a note if the number of microbatches changed and the model depends on it.

    Raises:
      ModelDirectoryError: If the configs differ, or the saved config cannot be read.
    """
    saved = directory.saved_config() or ""
    with file_errors(str(directory.operative_config)):
        changes = _differences(read_values(saved), read_values(config.operative_config_text()))
    lines = [change for name, change in changes.items() if not _may_change(name)]
    # What an item that took another's place has, or lacks, follows from a line about both.
    _refuse(directory, [line for line in lines if _UNSET not in line] or lines)
    if _MICROBATCHES in changes and trainer.normalizes:
        report(
            f"{changes[_MICROBATCHES]}. This model takes moments of each microbatch, so the "
            "resumed run computes other updates."
        )


def _refuse(directory: RunDirectory, lines: Sequence[str]) -> None:
    """Raises ModelDirectoryError if there are differences; those due to one macro are one line."""
    if lines:
        listing = "\n".join(f"  {line}" for line in dict.fromkeys(lines))
        raise ModelDirectoryError(
            f"The directory {directory.path} holds a run with other settings. The differences "
            f"(saved → given):\n{listing}\nTake another directory, or the settings of that run."
        )


def _may_change(name: str) -> bool:
    item, _, parameter = name.rpartition(".")
    is_owned = re.split("[/.]", item)[-1] in _OWNERS or parameter in _PARAMETERS
    return is_owned or name.startswith(_PLAN) or name == _MICROBATCHES


def _differences(
    saved: Mapping[str, tuple[Any, Any]], given: Mapping[str, tuple[Any, Any]]
) -> dict[str, str]:
    """Returns lines such as `cnn.filters: (32, 64) → (32,)`, by binding.

    Args:
      saved: The bindings of the run so far: the values as written and with macros expanded.
      given: The bindings now.
    """
    found, unset = {}, (_UNSET, _UNSET)
    for name in {**saved, **given}:
        (raw, before), (other, after) = saved.get(name, unset), given.get(name, unset)
        if before != after and not name.endswith("/gin.macro.value"):
            is_macro = repr(raw).startswith("%") and raw == other
            found[name] = f"{repr(raw)[1:] if is_macro else name}: {before!r} → {after!r}"
    return found


def compare_arguments(directory: RunDirectory, given: Mapping[str, str]) -> None:
    """Compares the arguments of a new trainer with those of the run so far, of `ddl.fit`.

    Args:
      directory: The directory of the run.
      given: See `arguments_of`.

    Raises:
      ModelDirectoryError: If one differs, or the file of the run so far cannot be read.
    """
    if not directory.arguments.exists():
        return
    with file_errors(str(directory.arguments)):
        saved = json.loads(directory.arguments.read_bytes())
    changes = {name: (saved[name], given[name]) for name in saved if name in given}
    _refuse(directory, [f"{name}: {a} → {b}" for name, (a, b) in changes.items() if a != b])


def arguments_of(trainer: Trainer) -> dict[str, str]:
    """Returns the plain values that a trainer was made with, as JSON by name."""
    found: dict[str, Any] = {"global_batch_size": trainer.global_batch_size}
    first = next(iter(trainer.pipelines.values()))
    found |= {"seed": first.seed, "shuffle": first.shuffle}
    found |= {f"task.{name}": value for name, value in attributes_of(trainer.task).items()}
    for name, optimizer in by_name(trainer.optimizer).items():
        with suppress(NotImplementedError):  # of a schedule that Keras cannot save
            arguments = optimizer.get_config()
            if isinstance(rate := arguments["learning_rate"], float):
                arguments["learning_rate"] = float(f"{rate:.7g}")  # a float32
            name = "optimizer" if name == ONLY else f"optimizer {name}"
            found |= {f"{name}.{key}": value for key, value in arguments.items() if key != "name"}
    found["layers"] = [type(layer).__name__ for layer in layers_of(trainer.task)]
    for place, layer in enumerate(layers_of(trainer.task)):
        with suppress(NotImplementedError):
            plain = {
                k: v for k, v in layer.get_config().items() if isinstance(v, int | float | str)
            }
            of = f"layer {place}, {type(layer).__name__}"
            found |= {f"{of}.{key}": value for key, value in plain.items() if key != "name"}
    texts = {}
    for name, value in found.items():
        with suppress(TypeError, ValueError):  # another object, such as a model
            texts[name] = json.dumps(value, default=np.ndarray.tolist)
    return texts
