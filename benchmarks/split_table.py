"""A table of 2 GB over two parameter servers: python -m benchmarks.split_table.

A table of 16,777,216 rows of 32 numbers in float32, 2.1 GB, is looked up at random and trained by
SGD with `python -m ddl.launch --num_ps=2 --num_workers=1`. It is split into 64 parts
(`table_mlp.max_table_parts`), of which each server holds 32. The run saves every 200 updates.
After update 400 one server is killed by SIGKILL: the launcher starts all processes again,
and the run goes on from the last checkpoint to update 600, its end.

The memory of a server is its resident memory, read five times a second, minus that of a server in
the same run with a table of 1,000 rows. Shares are those of the table's bytes. The target is that
no server holds more than 60% of the table, at any time: while the table is initialized, trained,
saved and restored. While a part is drawn or read, its server holds copies of this part.
"""

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks import command
from benchmarks.memory import megabytes
from benchmarks.report import Bar, Report, Table

WIDTH, PARTS, SERVERS = 32, 64, 2
MOST = 0.6
CONFIG = """
include 'standard.gin'
SEED = 0
GLOBAL_BATCH_SIZE = 256
TRAIN_STEPS = {steps}
EVAL_EVERY = None
CHECKPOINT_EVERY = {save}
LOG_EVERY = 20
LEARNING_RATE = 0.1
PRECISION = 'float32'
CLIP_NORM = None
ACCUMULATION_STEPS = 1
Trainer.task = @MultiLabel()
MultiLabel.model = @table_mlp()
table_mlp.num_outputs = 1
table_mlp.categories = {{'item': {rows}}}
table_mlp.embedding_width = {width}
table_mlp.max_table_parts = {parts}
Trainer.optimizer = @FusedSGD()
FusedSGD.learning_rate = @LearningRate()
LearningRate.schedule = %LEARNING_RATE
Trainer.train_data = @synthetic_arrays()
synthetic_arrays.elements = {{'item': ((), 'int64'), 'label': ((1,), 'bool')}}
synthetic_arrays.below = {{'item': {rows}}}
synthetic_arrays.num_examples = 102400
Retention.last = 1
"""


@dataclasses.dataclass
class Found:
    """What a run showed.

    Attributes:
      peaks: Largest resident memory of each server in MiB, by the server's number, over all of its
        processes.
      others: The same of the chief and the worker, by name.
      status: Exit status of the launcher.
      text: What the launcher showed.
    """

    peaks: dict[int, float]
    others: dict[str, float]
    status: int
    text: str


def tasks_of(model_dir: str) -> Iterator[tuple[str, int, int]]:
    """Yields kind, number and process of each task of the run in a folder."""
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, KeyError):
            if f"--model_dir={model_dir}\0".encode() not in (process / "cmdline").read_bytes():
                continue
            environment = (process / "environ").read_bytes().split(b"\0")
            found = [each[10:] for each in environment if each.startswith(b"TF_CONFIG=")]
            if found:  # the launcher has no task
                task = json.loads(found[0])["task"]
                yield task["type"], int(task["index"]), int(process.name)


def run(rows: int, steps: int, kill: bool) -> Found:
    """Launches a run, and kills a server once a checkpoint is written, if asked to."""
    with tempfile.TemporaryDirectory(prefix="split_table") as folder:
        model_dir = f"{folder}/run"
        config = Path(folder) / "config.gin"
        config.write_text(
            CONFIG.format(steps=steps, save=steps // 3, rows=rows, width=WIDTH, parts=PARTS)
        )
        launched = [sys.executable, "-m", "ddl.launch", f"--num_ps={SERVERS}", "--num_workers=1"]
        launched += ["--max_restarts=1", "--", f"--gin_file={config}", f"--model_dir={model_dir}"]
        launched += ["--mode=train"]
        process = subprocess.Popen(
            launched, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        found = Found({}, {}, -1, "")
        watcher = threading.Thread(target=_watch, args=(process, model_dir, found), daemon=True)
        watcher.start()
        assert process.stdout is not None
        for line in process.stdout:
            found.text += line
            print(line, end="", flush=True)
            # The save before this update has waited until the earlier one was written.
            if kill and (step := re.match(r"step (\d+) ", line)) and int(step[1]) > steps * 2 // 3:
                kill = False
                number = {(k, i): n for k, i, n in tasks_of(model_dir)}[("ps", 1)]
                os.kill(number, signal.SIGKILL)
        found.status = process.wait()
        watcher.join()
        return found


def _watch(process: subprocess.Popen, model_dir: str, found: Found) -> None:
    """Notes the largest memory of each task, until the launcher has ended."""
    while process.poll() is None:
        for kind, index, number in tasks_of(model_dir):
            with contextlib.suppress(OSError, KeyError):
                now = megabytes(number)["present"]
                if kind == "ps":
                    found.peaks[index] = max(found.peaks.get(index, 0.0), now)
                else:
                    found.others[kind] = max(found.others.get(kind, 0.0), now)
        time.sleep(0.2)


def measure(quick: bool) -> Report:
    """Measures a run with a small table, then that with the large one."""
    rows, steps = (2**17, 120) if quick else (2**24, 600)
    size = rows * WIDTH * 4 / 2**20
    idle = run(1_000, 40, kill=False)
    large = run(rows, steps, kill=True)
    for found in (idle, large):
        if found.status != 0:
            raise RuntimeError(f"A run ended with status {found.status}:\n{found.text}")
    own = {number: large.peaks[number] - idle.peaks[number] for number in sorted(large.peaks)}
    rows_of_table: list[list[str | float]] = [
        [f"server {number}", idle.peaks[number], large.peaks[number], held, 100 * held / size]
        for number, held in own.items()
    ]
    for kind, peak in sorted(large.others.items()):
        held = peak - idle.others[kind]
        rows_of_table.append([kind, idle.others[kind], peak, held, 100 * held / size])
    columns = ["", "small table, MiB", "large table, MiB", "difference, MiB", "% of the table"]
    restored = re.search(r"Restored step ([\d,]+)", large.text)
    notes = [
        f"The table has {size:,.0f} MiB. After the kill of server 1 the launcher restarted all "
        f"processes, the run restored step {restored[1] if restored else '?'}, and the launcher "
        f"ended with status {large.status} at step {steps}."
    ]
    bars = []
    if not quick:
        largest = max(own.values()) / size
        bars = [Bar("largest memory of a server / the table's", largest, MOST, "at most")]
    return Report([Table("Largest resident memory", columns, rows_of_table)], bars, notes=notes)


if __name__ == "__main__":
    command.main(measure)
