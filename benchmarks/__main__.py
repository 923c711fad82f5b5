"""The command python -m benchmarks: runs each benchmark in its own process and writes the page.

Without names it runs all but the long ones and those that need a GPU. If a benchmark fails, the
page holds its earlier result, and the exit status is 1.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys

from benchmarks import BENCHMARKS, LONG, ON_GPU, harness, page

_LIMIT_SECONDS = 3600  # only ends what hangs


def run(command: list[str], limit_seconds: float = _LIMIT_SECONDS) -> str:
    """Runs a command, kills its process group afterwards, and returns why it failed, or ""."""
    process = subprocess.Popen(command, start_new_session=True)
    try:
        status = process.wait(limit_seconds)
    except subprocess.TimeoutExpired:
        return f"stopped after {limit_seconds} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return f"status {status}" if status else ""


def main() -> None:
    """Runs the benchmarks, writes the page and reports failures."""
    known = (*BENCHMARKS, *LONG, *ON_GPU)
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(known))
    harness.add_flags(parser)
    flags = parser.parse_args()
    if unknown := {*flags.names} - {*known}:
        parser.error(f"There is no benchmark {', '.join(unknown)}. Choose from {', '.join(known)}.")
    results, failed = harness.results_folder(flags), []
    for name in flags.names or BENCHMARKS:
        command = [sys.executable, "-m", f"benchmarks.{name}", f"--results={results}"]
        command += [f"--only={flags.only}", *(["--quick"] if flags.quick else [])]
        if why := run(command):
            failed.append(f"{name}: {why}")
    print(f"Wrote {page.write(results)}.")
    if failed:
        sys.exit(f"The page holds earlier results of those that failed: {'; '.join(failed)}.")


if __name__ == "__main__":
    main()
