import ctypes
import os
import signal
import subprocess
import sys
import threading

import pytest

from ddl.signals import StopSignals, deferring_interrupt


def test_a_signal_is_noted_while_python_waits_for_a_call():
    """As while TensorFlow trains: the main thread gets to no instruction of its own."""
    library, mutex, seen = ctypes.CDLL(None), ctypes.create_string_buffer(64), []

    def end_the_call(noted):
        seen.append(noted)
        library.pthread_mutex_unlock(mutex)

    late = threading.Timer(60, end_the_call, [False])  # or the test would wait forever
    late.start()
    library.pthread_mutex_lock(mutex)
    with StopSignals(lambda: end_the_call(True)):
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        library.pthread_mutex_lock(mutex)
    late.cancel()
    assert seen[0]


def test_a_second_signal_cuts_off_no_save_and_a_third_interrupt_ends_at_once():
    program = (
        "import os, signal, time\n"
        "from ddl.signals import StopSignals\n"
        "with StopSignals(lambda: None) as stop:\n"
        "    for name in ('SIGTERM', 'SIGTERM', 'SIGINT'):\n"
        "        os.kill(os.getpid(), getattr(signal, name))\n"
        "        time.sleep(0.3)\n"
        "        print(name, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(600)\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, timeout=300, check=False, capture_output=True, text=True)
    assert done.returncode == 128 + signal.SIGINT
    assert done.stdout.split() == ["SIGTERM", "SIGTERM", "SIGINT"]
    assert done.stderr.count("a third SIGINT ends it") == 1


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_is_raised_after_the_block():
    answered, calls = threading.Event(), []

    def block():
        with deferring_interrupt(answered.set, lambda: calls.append("withdrawn")):
            interrupt()
            assert answered.wait(60)
            interrupt()  # a second one changes nothing
            calls.append("the rest of the block")

    with pytest.raises(KeyboardInterrupt):
        block()
    assert calls == ["the rest of the block", "withdrawn"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
