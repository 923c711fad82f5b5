"""A launcher with real processes."""

import os
import signal
import subprocess
import sys

import pytest

from tests.launcher.programs import BEGINNING, ROOT, is_running


@pytest.fixture
def launch(tmp_path):
    """Starts a launcher of a program's processes, all in a folder for their notes."""
    started = []

    def start(program, num_workers=2, num_ps=0, *, before="", environment=None, **options):
        command = f"[sys.executable, '-S', '-c', {BEGINNING + program!r}]"
        options = {"log_dir": "logs", **options}
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})}
        environment.pop("PYTHONUNBUFFERED", None)
        launcher = (
            "import os, signal, sys\n"
            f"{before}\n"
            "from ddl.launcher.cluster import Cluster\n"
            f"sys.exit(Cluster({command}, {num_workers}, {num_ps}, **{options!r}).run())"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", launcher],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
    for file in tmp_path.glob("*.pid"):  # what a failed test left
        if is_running(file):
            os.kill(int(file.read_text()), signal.SIGKILL)
    for process in started:
        process.communicate()
