import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

from ddl.diagnosis import stacks
from ddl.diagnosis.phases import during
from ddl.signals import StopSignals

PROGRAM = """
import os, signal, sys, threading
from contextlib import nullcontext
from ddl.diagnosis.phases import during
from ddl.diagnosis.stacks import shown_on_quit
from ddl.signals import StopSignals

def stuck_here():
    print("ready", flush=True)
    threading.Event().wait()

stopping = StopSignals(lambda: None) if sys.argv[1] == "in a run" else nullcontext()
with shown_on_quit(), stopping, during("the training loop", lambda: " from step 7"):
    os.kill(os.getpid(), signal.SIGUSR2)
    stuck_here()
"""


def test_sigquit_shows_stacks_and_phases_and_the_process_goes_on():
    for where in ("in a run", "before"):
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, where],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout.readline() == "ready\n"
        for _ in range(2):
            process.send_signal(signal.SIGQUIT)
            lines = []
            while not lines or "the training loop" not in lines[-1]:
                lines.append(process.stderr.readline())
                assert lines[-1], lines
            text = "".join(lines)
            assert "in stuck_here" in text
            assert "the training loop from step 7, for " in text
            assert process.poll() is None
            # faulthandler gives the signal to Python's handler, and only then sets its own again.
            time.sleep(0.5)
        process.kill()
        process.wait()


def test_a_report_has_phases_stacks_and_the_place_of_the_error(tmp_path, monkeypatch):
    monkeypatch.setattr(stacks, "_FOLDER", {"of the run": None})
    assert stacks.keep("Worker 1 died.") is None
    stacks.keep_in(tmp_path)
    try:
        with during("a collective of all workers"):
            int("no number")
    except ValueError as error:
        file = stacks.keep("Worker 1 died.", error)
    assert file.parent == tmp_path / "stacks"
    assert str(os.getpid()) in file.name
    text = file.read_text()
    assert "Worker 1 died." in text
    assert "a collective of all workers, for" in text
    assert f'File "{__file__}"' in text.split("at its origin first")[1]
    monkeypatch.setattr(stacks, "_write", lambda *_: threading.Event().wait())
    monkeypatch.setattr(stacks, "_KEEP_SECONDS", 0.01)
    assert stacks.keep("Worker 1 died.") is None  # a file system that does not answer
    monkeypatch.undo()
    monkeypatch.setattr(stacks, "_FOLDER", {"of the run": tmp_path / "stacks"})
    file.unlink()
    file.symlink_to(tmp_path / "planted")
    assert stacks.keep("Worker 1 died.") is None
    assert not (tmp_path / "planted").exists()


def test_other_signals_reach_the_descriptor_that_was_set_before():
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing)
    handler = signal.signal(signal.SIGUSR2, lambda *_: None)
    try:
        with StopSignals(lambda: None) as stop:
            os.kill(os.getpid(), signal.SIGUSR2)
            assert os.read(reading, 1)[0] == signal.SIGUSR2
        assert stop.received is None
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writing, bytes(4096))
        answered = threading.Event()
        with StopSignals(answered.set):
            os.kill(os.getpid(), signal.SIGUSR2)  # cannot be passed on
            os.kill(os.getpid(), signal.SIGTERM)
            assert answered.wait(60)
    finally:
        signal.signal(signal.SIGUSR2, handler)
        signal.set_wakeup_fd(before)
        os.close(reading)
        os.close(writing)
