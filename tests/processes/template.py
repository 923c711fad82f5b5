"""The process whose forks become programs; see `forked.py`."""

import array
import atexit
import gc
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence
from typing import NoReturn

_PACKAGES = ("ddl", "gin", "absl")  # hold a program's state: each imports them anew
_installed = sys.path[1:]  # where the template, which has no PYTHONPATH, finds packages


def main(descriptor: int) -> None:
    """Serves the socket; in a fork, runs the program and returns at its end."""
    _import_what_programs_import()
    request = _serve(socket.socket(fileno=descriptor))
    _become(request)
    _run(request["arguments"])


def fork(
    request: dict, streams: Sequence[int], session: bool, prepare: Callable[[], None] | None
) -> int:
    """Forks a program itself into another one, such as a launcher into a worker."""
    sys.stdout.flush()
    sys.stderr.flush()
    number = os.fork()
    if number:
        return number
    status = 70
    try:
        weakref.finalize._registry.clear()  # such as of folders of the program it was forked from
        if session:
            os.setsid()
        if prepare is not None:
            prepare()
        _connect(streams)
        signal.set_wakeup_fd(-1)  # the descriptor of the program it was forked from is closed
        os.closerange(3, 65536)
        _become(request)
        _run(request["arguments"])
        status = 0
    except SystemExit as exit_:
        status = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        _end(status)


def _run(arguments: Sequence[str]) -> None:
    if arguments[1] == "-m":
        runpy.run_module(arguments[2], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(arguments[1], run_name="__main__")


def _end(status: int) -> NoReturn:
    """Ends as Python ends, but for the frames of the program that this one was forked from."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _import_what_programs_import() -> None:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import ddl.main
    import ddl.run.from_checkpoints
    import ddl.run.train  # noqa: F401

    _forget_packages()
    gc.collect()
    gc.freeze()  # a collection in a fork would copy all memory of the template


def _forget_packages() -> None:
    for name in list(sys.modules):
        if name.partition(".")[0] in _PACKAGES:
            del sys.modules[name]


def _serve(connection: socket.socket) -> dict:
    """Forks for each command; returns only in the forks, with the command."""
    while True:
        request, streams = _receive(connection)
        reading, writing = os.pipe()
        between = os.fork()
        if between:
            os.waitpid(between, 0)  # now the program is a child of the caller
            connection.sendall(os.read(reading, 8))
            for opened in (reading, writing, *streams):
                os.close(opened)
            continue
        program = os.fork()
        if program:
            os.write(writing, program.to_bytes(8, "big"))
            os._exit(0)
        connection.close()
        os.close(reading)
        os.close(writing)
        if request["session"]:
            os.setsid()
        _connect(streams)
        for stream in streams:
            if stream > 2:
                os.close(stream)
        return request


def _receive(connection: socket.socket) -> tuple[dict, list[int]]:
    """Waits for a command; ends this process when the caller has ended."""
    streams = array.array("i")
    head, passed, _, _ = connection.recvmsg(8, socket.CMSG_LEN(3 * streams.itemsize))
    if len(head) < 8:
        os._exit(0)
    for _, _, content in passed:
        streams.frombytes(content)
    size = int.from_bytes(head, "big")
    return json.loads(connection.recv(size, socket.MSG_WAITALL)), list(streams)


def _connect(streams: Sequence[int]) -> None:
    copies = [os.dup(stream) for stream in streams]
    for number, copy in enumerate(copies):
        os.dup2(copy, number)
        os.close(copy)


def _become(request: dict) -> None:
    """Gives this process the folder, environment, arguments and streams of the command."""
    from tests.processes import forked

    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    given = request["environment"].get("PYTHONPATH", "").split(os.pathsep)
    _, program, *others = request["arguments"]
    first = os.getcwd() if program == "-m" else os.path.dirname(os.path.abspath(program))
    sys.path[:] = [first, *filter(None, given), *_installed]
    sys.argv[:] = others if program == "-m" else [program, *others]
    _forget_packages()
    unbuffered = bool(request["environment"].get("PYTHONUNBUFFERED"))
    for name, number in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        if number:
            file = open(number, "wb", 0 if unbuffered else -1, closefd=False)  # noqa: SIM115
            stream = io.TextIOWrapper(file, line_buffering=number == 2, write_through=unbuffered)
        else:
            stream = open(number, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    forked.in_a_program = True
    subprocess.Popen = forked.Popen
