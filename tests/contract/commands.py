"""Commands of ddl in this process, since the start of TensorFlow takes longer than a small run."""

import contextlib
import importlib
import io
import json
import os
import re
import runpy
import sys
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from absl.testing import flagsaver

SMALL = Path(__file__).parent / "small.gin"
FOUR_DEVICES = ("--strategy=mirrored", "--num_virtual_devices=4")  # as tests/conftest.py has


class Ended(NamedTuple):
    """A command that ended: its exit status, standard output and standard error."""

    status: int
    out: str
    err: str


def ddl_main(*arguments: object) -> Ended:
    """Runs `python -m ddl ARGUMENTS` in this process, with flags of its own."""
    assert len(tf.config.list_logical_devices("CPU")) == 4  # and no command can change it now
    keras.utils.clear_session()
    importlib.import_module("ddl.main")  # defines the flags before they are saved
    out, err, status = io.StringIO(), io.StringIO(), 0
    with contextlib.ExitStack() as stack:
        stack.enter_context(flagsaver.flagsaver())
        stack.enter_context(mock.patch.object(os, "_exit", sys.exit))
        stack.enter_context(mock.patch.object(sys, "argv", ["ddl", *map(str, arguments)]))
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        try:
            runpy.run_module("ddl", run_name="__main__")
        except SystemExit as ended:
            status = int(ended.code or 0)
    return Ended(status, out.getvalue(), err.getvalue())


def small(model_dir: Path | None, *params: str, flags: tuple[str, ...] = ()) -> Ended:
    """Runs small.gin with further bindings; without a directory it is a dry run."""
    return ddl_main(*arguments(model_dir, *params), *flags)


def arguments(model_dir: Path | None, *params: str) -> list[str]:
    """Returns the arguments of `small`."""
    where = "--dry_run" if model_dir is None else f"--model_dir={model_dir}"
    return [f"--gin_file={SMALL}", *(f"--gin_param={param}" for param in params), where]


def done(model_dir: Path | None, *params: str, flags: tuple[str, ...] = ()) -> Ended:
    """Runs small.gin to its end, as `small`, and returns what it wrote."""
    ended = small(model_dir, *params, flags=flags)
    assert ended.status == 0, ended.err
    return ended


def finished(model_dir: Path, *params: str, flags: tuple[str, ...] = ()) -> Path:
    """Runs small.gin to its end and returns the directory."""
    done(model_dir, *params, flags=flags)
    return model_dir


def assert_error(ended: Ended, *words: str, status: int = 1) -> None:
    """Asserts that a command ended with an error: a few lines, with these words."""
    assert ended.status == status, ended.err
    assert [word for word in words if word not in ended.err] == [], ended.err
    assert "Traceback" not in ended.err
    assert len(ended.err.strip().splitlines()) <= 6, ended.err


def lines(model_dir: Path, split: str = "") -> list[dict]:
    """Returns the lines of metrics.jsonl; NaN and infinity are no JSON."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} in metrics.jsonl")

    text = (model_dir / "metrics.jsonl").read_text()
    found = [json.loads(line, parse_constant=refuse) for line in text.splitlines()]
    return [line for line in found if line["split"] in (split or ("train", "eval"))]


def results(model_dir: Path) -> list[tuple]:
    """Returns what the lines of a run say of its computation, without its speed and memory."""
    names = ("split", "step", "epoch", "loss", "accuracy", "learning_rate")
    return [tuple(line.get(name) for name in names) for line in lines(model_dir)]


def saved_steps(model_dir: Path) -> list[int]:
    """Returns the steps of the checkpoints."""
    names = [path.stem for path in (model_dir / "checkpoints").glob("*.index")]
    return sorted(int(re.search(r"\d+$", name)[0]) for name in names)


def saved(model_dir: Path, step: int | None = None) -> dict[str, np.ndarray]:
    """Returns the numbers in a checkpoint by name, those of the newest one by default."""
    step = saved_steps(model_dir)[-1] if step is None else step
    (index,) = (model_dir / "checkpoints").glob(f"*[!0-9]{step}.index")
    reader = tf.train.load_checkpoint(str(index.with_suffix("")))
    types = reader.get_variable_to_dtype_map()
    return {name: reader.get_tensor(name) for name in types if types[name] != tf.string}


def assert_same_end(model_dir: Path, reference: Path) -> None:
    """Asserts that two runs ended with the same bits and wrote the same figures."""
    ours, theirs = saved(model_dir), saved(reference)
    assert ours.keys() == theirs.keys()
    assert sum(value.size for value in theirs.values()) > 1210  # the weights of small.gin
    for name, value in theirs.items():
        np.testing.assert_array_equal(ours[name], value, err_msg=name)
    assert results(model_dir) == results(reference)
