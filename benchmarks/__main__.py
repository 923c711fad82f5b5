"""The command python -m benchmarks: runs each benchmark in its own process and writes the page.

Without names it runs all but the long ones and those that need a GPU. If a benchmark fails, the
results of the others are kept and the exit status is 1.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time

from benchmarks import BENCHMARKS, LONG, ON_GPU, command, page

# Only ends what hangs. The windows of contenders have limits of their own.
_LIMIT_SECONDS = 6 * 3600


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
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Runs the benchmarks and writes their page."
    )
    known = (*BENCHMARKS, *LONG, *ON_GPU)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(known))
    command.add_flags(parser)
    flags = parser.parse_args()
    if unknown := {*flags.names} - {*known}:
        parser.error(f"There is no benchmark {', '.join(unknown)}. Choose from {', '.join(known)}.")
    for name in {*flags.names} & {*ON_GPU}:
        command.need_gpu(f"The benchmark {name}")
    failed = []
    start = time.monotonic()
    for name in flags.names or BENCHMARKS:
        started = [sys.executable, "-m", f"benchmarks.{name}", f"--results={flags.results}"]
        started += ["--quick"] if flags.quick else []
        if why := run(started):
            failed.append(f"{name}: {why}")
            print(f"benchmarks.{name} failed: {why}.", file=sys.stderr, flush=True)
    minutes = (time.monotonic() - start) / 60
    print(f"Finished in {minutes:.1f} minutes. Wrote {page.write_page(flags.results)}.")
    if failed:
        print(
            "These benchmarks failed; the page holds the cases that they measured, or else their "
            "earlier results: " + "; ".join(failed),
            file=sys.stderr,
        )
        sys.exit(1)


if __name__ == "__main__":
    main()
