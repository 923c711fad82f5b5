"""Memory growth of a long run: python -m benchmarks.memory.

The benchmark starts configs/digits_cnn_regularized.gin from the command line, mirrored on 2 virtual
devices, with an evaluation every 400 updates, a checkpoint every 200 and a log every 50, once for
2,000 updates and once for 20,000. The figure is the peak of the resident memory of the process.
"""

import sys
import tempfile

from benchmarks import harness
from benchmarks.harness import ROOT, Options, Report, Table, Target, spread

STEPS = (2_000, 20_000)
PERIODS = ("EVAL_EVERY = 400", "CHECKPOINT_EVERY = 200", "LOG_EVERY = 50")


def peak(steps: int) -> float:
    """Runs ddl, and returns the peak of its resident memory in MiB."""
    with tempfile.TemporaryDirectory(prefix="memory") as folder:
        command = [sys.executable, "-m", "ddl.main", f"--model_dir={folder}/run"]
        command += [f"--gin_file={ROOT / 'configs' / 'digits_cnn_regularized.gin'}"]
        command += ["--strategy=mirrored", "--num_virtual_devices=2"]
        command += [f"--gin_param={param}" for param in (f"TRAIN_STEPS = {steps}", *PERIODS)]
        return harness.peak_memory(command)


def measure(options: Options) -> Report:
    """Measures runs of both lengths by turns."""
    few, many = (step // 10 for step in STEPS) if options.quick else STEPS
    runs = {f"{steps:,}": lambda steps=steps: peak(steps) for steps in (few, many)}
    first, last = harness.interleaved(runs, 1 if options.quick else 2).values()
    rows = [[f"{few:,}", spread(first)], [f"{many:,}", spread(last)]]
    what = f"peak after {many:,} updates / after {few:,}"
    target = Target(what, spread(last / first), 1.05, "at most")
    return Report([Table("", ["updates", "peak, MB"], rows)], [target])


if __name__ == "__main__":
    harness.main(measure)
