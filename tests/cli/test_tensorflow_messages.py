import subprocess
import sys

# The block writes to the descriptor itself, as TensorFlow's libraries do.
_PROGRAM = """
import os
from ddl.cli.tensorflow_messages import quiet_start_up
with quiet_start_up():
    os.write(2, b"I0000 00:00:1 1 port.cc:1] chatter\\n")
    os.write(2, b"WARNING: All log messages before absl::InitializeLog() are chatter\\n")
    os.write(2, b"E0000 00:00:1 1 gpu.cc:1] an error\\n")
    print("a traceback", file=__import__("sys").stderr)
    {last}
"""


def stderr_of(last: str, **environment: str) -> str:
    environment = {"PATH": "", **environment}
    result = subprocess.run(
        [sys.executable, "-c", _PROGRAM.format(last=last)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    return result.stderr


def test_drops_chatter_and_passes_errors_on():
    assert stderr_of("pass") == "E0000 00:00:1 1 gpu.cc:1] an error\na traceback\n"


def test_passes_errors_on_when_the_start_fails():
    text = stderr_of("raise ImportError('no TensorFlow')")
    assert "an error" in text
    assert "ImportError: no TensorFlow" in text


def test_does_nothing_for_those_who_want_to_see():
    assert "chatter" in stderr_of("pass", TF_CPP_MIN_LOG_LEVEL="0")


def test_an_abort_loses_nothing():
    """TensorFlow ends a process so when a check of its own fails."""
    text = stderr_of("os.write(2, b'F0000 check failed\\nlast words'); os.abort()")
    assert text == "E0000 00:00:1 1 gpu.cc:1] an error\na traceback\nF0000 check failed\nlast words"


def test_what_a_process_writes_that_was_started_meanwhile_arrives():
    start = "__import__('subprocess').Popen(['/bin/sh', '-c', '/bin/sleep 0.3; echo later >&2'])"
    assert stderr_of(start) == "E0000 00:00:1 1 gpu.cc:1] an error\na traceback\nlater\n"


def test_a_full_disk_ends_no_start():
    with open("/dev/full", "wb", buffering=0) as full:
        program = _PROGRAM.format(last="") + "\nprint('begun')"
        result = subprocess.run(
            [
                sys.executable,
                "-c",
                "from ddl.output import *; protect_standard_streams('ddl')" + program,
            ],
            stdout=subprocess.PIPE,
            stderr=full,
            env={"PATH": ""},
            check=False,
        )
    assert (result.returncode, result.stdout) == (0, b"begun\n")
