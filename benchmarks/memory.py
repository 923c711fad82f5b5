"""Memory growth of a long run: python -m benchmarks.memory.

The benchmark starts one run of configs/digits_cnn_regularized.gin from the command line, with an
evaluation every 400 updates, a checkpoint every 200 and a log every 50. It reads the run's peak and
present resident memory after 2,000 and after 20,000 updates. The target: the second peak is within
5% of the first.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import command, report
from benchmarks.report import Bar, Report, Table

STEPS = (2_000, 20_000)
PERIODS = ("EVAL_EVERY = 400", "CHECKPOINT_EVERY = 200", "LOG_EVERY = 50")


def megabytes(process_id: int) -> dict[str, float]:
    """Returns the resident memory of a process in MiB: the peak so far, and at present."""
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{process_id}/status").read_text().splitlines()
    )
    names = {"peak": "VmHWM", "present": "VmRSS"}
    return {name: int(status[field].split()[0]) / 1024 for name, field in names.items()}


def last_step(metrics: Path) -> int:
    """Returns the last step in metrics.jsonl; 0 if there is none."""
    text = metrics.read_text() if metrics.exists() else ""
    lines = text.splitlines()[: text.count("\n")]  # drops an unfinished last line
    return json.loads(lines[-1])["step"] if lines else 0


def memory_of_run(
    steps: tuple[int, ...], plan: tuple[str, ...], *flags: str
) -> dict[int, dict[str, float]]:
    """Runs ddl once and returns `megabytes` of the run after each of these steps."""
    found: dict[int, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="memory") as folder:
        config = Path(__file__).parent.parent / "configs" / "digits_cnn_regularized.gin"
        command = [sys.executable, "-m", "ddl.main", f"--gin_file={config}", *flags]
        command += [f"--model_dir={folder}/run", *(f"--gin_param={line}" for line in plan)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        waiting = list(steps)
        while waiting and process.poll() is None:
            try:
                now = megabytes(process.pid)
            except (OSError, KeyError):
                break  # the run ended
            # Memory is read before the step, so that it does not include later steps.
            if last_step(Path(folder) / "run" / "metrics.jsonl") >= waiting[0]:
                found[waiting.pop(0)] = now
            elif len(waiting) == 1:
                found[waiting[0]] = now  # the last value before the run ends
            time.sleep(0.05)
        if process.wait() != 0:
            raise RuntimeError(f"The run ended with status {process.returncode}.")
    return found


def measure(quick: bool) -> Report:
    """Measures one run."""
    steps = tuple(step // 10 for step in STEPS) if quick else STEPS
    plan = (f"TRAIN_STEPS = {steps[-1]}", *PERIODS)
    found = memory_of_run(steps, plan, "--strategy=mirrored", "--num_virtual_devices=2")
    first, last = (found[step] for step in steps)
    rows = [[f"{step:,}", now["peak"], now["present"]] for step, now in found.items()]
    table = Table("", ["updates", "peak, MB", "current, MB"], rows)
    return Report(
        [table],
        plots=[report.plot_of(table, table.columns[1:], "MB")],
        bars=[
            Bar(
                f"peak after {steps[1]:,} updates / after {steps[0]:,}",
                last["peak"] / first["peak"],
                1.05,
                "at most",
            )
        ],
    )


if __name__ == "__main__":
    command.main(measure)
