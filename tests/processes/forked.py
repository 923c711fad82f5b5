"""Python programs as processes that are forked with TensorFlow already imported.

A start of `ddl.main` spends most of its processor time importing TensorFlow. `Popen` and `run`
take the arguments of `subprocess.Popen` and `subprocess.run`. They start modules and files with
`sys.executable` as forks of a template process (`template.py`), which has imported TensorFlow and
Keras and nothing of ddl. All other commands are started as usual.

A forked program that starts others itself, as `ddl.launch` does, forks them likewise.

The processes are real: children of the caller with process IDs, pipes, a directory, environment
and signals of their own. Two things differ from a start of Python: /proc shows the template's
command line; and what is read when TensorFlow is imported is that of the template, so commands that
set such variables are started as usual.
"""

import array
import atexit
import ctypes
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from tests.processes import template

in_a_program = False  # whether this process is itself such a fork

_ROOT = Path(__file__).parents[2]
_READ_AT_IMPORT = ("TF_", "OMP_", "KMP_", "OPENBLAS_", "XLA_", "CUDA_", "KERAS_", "MALLOC_")
_SET_CHILD_SUBREAPER = 36
_LIBRARY = ctypes.CDLL(None)


class Popen(subprocess.Popen):
    """A `subprocess.Popen` whose process is a fork of the template where that is possible."""

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest):
        environment = dict(os.environ if env is None else env)
        pipes, session = rest[3:9], rest[14]
        if pass_fds or not _is_forkable(args, environment):
            super()._execute_child(
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest
            )
            return
        streams = [
            standard if given == -1 else given
            for standard, given in enumerate((pipes[0], pipes[3], pipes[5]))
        ]
        request = {
            "arguments": [os.fspath(argument) for argument in args],
            "folder": os.fspath(cwd or os.getcwd()),
            "environment": environment,
            "session": session,
        }
        if in_a_program:
            self.pid = template.fork(request, streams, session, preexec_fn)
        else:
            self.pid = _template().fork(request, streams)
        self._child_created = True
        self._close_pipe_fds(*pipes)


def run(command, *, capture_output=False, timeout=None, check=False, **options):
    """Runs a command to its end and returns its output; see `subprocess.run`."""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(command, **options) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    if check and process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, output, errors)
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def _is_forkable(arguments, environment) -> bool:
    if isinstance(arguments, (str, bytes)) or arguments[0] != sys.executable:
        return False
    if arguments[1].startswith("-") and arguments[1] != "-m":
        return False  # the code of -c may set variables before it imports TensorFlow
    started = os.environ if in_a_program else _template().environment
    return all(
        environment.get(name) == started.get(name)
        for name in {*environment, *started}
        if name.startswith(_READ_AT_IMPORT) and name != "TF_CONFIG"
    )


class _Template:
    """The process whose forks the programs are."""

    def __init__(self):
        self.environment = dict(os.environ)
        self._connection, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._owner = os.getpid()
        with other:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-c"),
                    f"from tests.processes import template; template.main({other.fileno()})",
                ],
                cwd=_ROOT,
                env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
                stdin=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
                start_new_session=True,
            )

    def fork(self, request: dict, streams: list[int]) -> int:
        """Returns the ID of a new child of this process that runs the command of `request`."""
        message = json.dumps(request).encode()
        passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", streams))]
        # The template forks twice and the process between ends, so that the program becomes a
        # child of its nearest subreaper. This process is one only until then, so that orphans of
        # the programs fall to init as they always do.
        _LIBRARY.prctl(_SET_CHILD_SUBREAPER, 1)
        try:
            self._connection.sendmsg([len(message).to_bytes(8, "big")], passed)
            self._connection.sendall(message)
            answer = self._connection.recv(8, socket.MSG_WAITALL)
        finally:
            _LIBRARY.prctl(_SET_CHILD_SUBREAPER, 0)
        if len(answer) < 8:
            raise RuntimeError("The template process ended. Its error stands above.")
        return int.from_bytes(answer, "big")

    def end(self) -> None:
        if os.getpid() == self._owner:
            self._connection.close()
            self._process.wait()


_started: list[_Template] = []


def _template() -> _Template:
    if not _started:
        _started.append(_Template())
        atexit.register(_started[0].end)
    return _started[0]
