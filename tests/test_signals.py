import hashlib
import os
import signal
import subprocess
import sys
import threading
import time

from ddl.signals import StopSignals


def wait_for(condition):
    for _ in range(500):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("nothing happened")


def test_the_first_signal_is_noted_and_answered():
    answered = threading.Event()
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals(answered.set) as stop:
        assert stop.received is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert answered.wait(5)
        assert stop.received is signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


def test_is_noted_while_python_waits_for_a_call():
    """As while TensorFlow trains: the main thread gets to no instruction of its own."""
    seen = []
    with StopSignals(lambda: seen.append(time.monotonic())):
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 2_000_000)  # about a second of C
        end = time.monotonic()
    assert seen
    assert end - seen[0] > 0.2


def test_other_signals_are_none_of_its_business():
    heard = []
    before = signal.signal(signal.SIGUSR1, lambda *arguments: heard.append(1))
    try:
        with StopSignals(lambda: None) as stop:
            os.kill(os.getpid(), signal.SIGUSR1)
            wait_for(lambda: heard)
            assert stop.received is None
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_the_second_signal_ends_the_process_at_once():
    program = (
        "import os, signal, time\n"
        "from ddl.signals import StopSignals\n"
        "with StopSignals(lambda: None) as stop:\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    while stop.received is None: time.sleep(0.01)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(30)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], timeout=20, check=False)
    assert done.returncode == 128 + signal.SIGINT
