"""Small programs that stand in for ddl.main in a cluster's processes, and what is asked of them."""

import time
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent

# What the programs begin with. None of them stays forever, whatever goes wrong. `note` leaves a
# file that is there whole or not at all; `wait_for` waits for one; `running` says that a process is
# there, and so are the handlers it has set.
BEGINNING = """
import json, os, pathlib, signal, subprocess, sys, time
signal.alarm(40)
config = json.loads(os.environ["TF_CONFIG"])
kind, index = config["task"]["type"], config["task"]["index"]
name = f"{kind}-{index}"
def note(file, text=""):
    pathlib.Path(file + ".partial").write_text(str(text))
    os.replace(file + ".partial", file)
def wait_for(*files):
    while not all(os.path.exists(file) for file in files):
        time.sleep(0.01)
def running():
    note(name + ".pid", os.getpid())
def wait_for_ever():
    while True:
        signal.pause()
"""

# Starts another process, which ignores SIGTERM.
GRANDCHILD = """
def start_another():
    ignore = "import os, pathlib, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    ignore += "signal.alarm(40); "
    tell = f"pathlib.Path('{name}-child.partial').write_text(str(os.getpid())); "
    end = f"os.replace('{name}-child.partial', '{name}-child.pid'); signal.pause()"
    subprocess.Popen([sys.executable, "-S", "-c", ignore + tell + end])
    wait_for(name + "-child.pid")
"""


def finish(launcher):
    output, errors = launcher.communicate(timeout=300)
    assert "Traceback" not in errors, errors
    return launcher.returncode, output, errors


def wait_for(condition):
    patience = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < patience, "nothing happened"
        time.sleep(0.01)


def is_running(file: Path) -> bool:
    try:
        state = Path(f"/proc/{int(file.read_text())}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state.rpartition(")")[2].split()[0] not in "ZX"


def assert_nothing_is_left(folder: Path, count: int):
    files = sorted(folder.glob("*.pid"))
    assert len(files) == count
    assert [file.name for file in files if is_running(file)] == []
