"""Runs of configs by the commands in their headers, in a folder of their own."""

import dataclasses
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import keras

ROOT = Path(__file__).parents[1]
QUICK = ("TRAIN_STEPS = 20", "LOG_EVERY = 10", "CHECKPOINT_EVERY = 20")


def commands_of(config: Path) -> list[list[str]]:
    """Returns the commands in the header of a config; the last one trains it."""
    header = re.match(r"(?:#.*\n)+", config.read_text())
    text = re.sub(r"\\\n#", " ", header[0] if header else "")
    found = re.findall(r"^# +(python -m ddl\.main .*)$", text, re.MULTILINE)
    own = f"/{config.name}"
    # Some headers name the command of their own config first, and what has to run before later.
    return sorted(map(shlex.split, found), key=lambda flags: any(own in flag for flag in flags))


@dataclasses.dataclass(frozen=True)
class Run:
    """A finished training.

    Attributes:
      command: Its command.
      folder: The folder in which the command ran.
      seconds: Time from the start of the process to its end.
    """

    command: Sequence[str]
    folder: Path
    seconds: float

    @property
    def model_dir(self) -> Path:
        """The model directory."""
        (given,) = (flag for flag in self.command if flag.startswith("--model_dir="))
        return self.folder / given.partition("=")[2]

    def lines(self, split: str) -> list[dict[str, float]]:
        """Returns the lines of `metrics.jsonl` of a split, without the split."""
        text = (self.model_dir / "metrics.jsonl").read_text()
        lines = map(json.loads, text.splitlines())
        return [line for line in lines if line.pop("split") == split]

    def model(self, name: str = "") -> keras.Model:
        """Returns an exported model of the task, by its name if the task exports several."""
        path = self.model_dir / "export" / name / "model.keras"
        if not path.exists():
            flags = [flag for flag in self.command if not flag.startswith("--mode=")]
            start([*flags, "--mode=export"], self.folder)
        return keras.models.load_model(path, compile=False)


class Runs:
    """Runs of configs. Each command runs once."""

    def __init__(self, folder: Path, quick: bool):
        """Prepares the folder: the commands name configs relative to it, and write into it.

        Args:
          folder: An empty folder.
          quick: Whether to train for a few steps only.
        """
        for name in ("configs", "examples"):
            (folder / name).symlink_to(ROOT / name)
        self._folder = folder
        self._quick = quick
        self._done: dict[tuple[str, ...], Run] = {}

    def __call__(self, config: str, *params: str) -> Run:
        """Runs the commands of a header, the last one with further parameters.

        Args:
          config: Path of the config from the root of the repository.
          *params: Values of `--gin_param` for the last command.

        Returns:
          The run of the last command.
        """
        *earlier, last = commands_of(ROOT / config)
        for command in earlier:
            self._run(command, ())
        return self._run(last, params)

    def _run(self, command: Sequence[str], params: Sequence[str]) -> Run:
        key = (*command, *params)
        if key not in self._done:
            if params:
                own = "-" + re.sub(r"\W+", "_", ",".join(params))
                command = [f + own if f.startswith("--model_dir=") else f for f in command]
            quick = QUICK if self._quick else ()
            if self._quick and "--mode=train" not in command:
                quick += ("EVAL_EVERY = 10",)
            command = [*command, *(f"--gin_param={param}" for param in (*params, *quick))]
            began = time.perf_counter()
            start(command, self._folder)
            self._done[key] = Run(command, self._folder, time.perf_counter() - began)
        return self._done[key]


def start(command: Sequence[str], folder: Path) -> None:
    """Runs a command in a folder.

    Raises:
      RuntimeError: If it fails, with the end of its output.
    """
    print(shlex.join(command), flush=True)
    finished = subprocess.run(
        [sys.executable, *command[1:]],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if finished.returncode:
        raise RuntimeError(
            f"{shlex.join(command)} ended with status {finished.returncode}:\n"
            f"{finished.stdout[-2000:]}"
        )
