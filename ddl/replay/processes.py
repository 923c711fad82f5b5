"""A process that replays a run, and the commands to it. Imports no TensorFlow."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import ddl
from ddl import errors
from ddl.errors import DdlError

_LOG_BYTES = 20_000
_LAST_LINES = 15


class Player(Protocol):
    """Answers the commands of `ddl.replay.replayer.Replayer`, one after the other."""

    def send(self, do: str, **arguments: Any) -> None:
        """Begins a command."""

    def receive(self) -> dict[str, Any]:
        """Waits for the result of the command that was begun.

        Raises:
          DdlError: If the command failed.
        """


def ask(player: Player, do: str, **arguments: Any) -> dict[str, Any]:
    """Sends a command and returns its result."""
    player.send(do, **arguments)
    return player.receive()


def ask_both(players: Sequence[Player], do: str, **arguments: Any) -> list[dict[str, Any]]:
    """Sends a command to several players, which work at the same time; returns the results."""
    for player in players:
        player.send(do, **arguments)
    return [player.receive() for player in players]


class ReplayFailed(DdlError, RuntimeError):
    """A process of a replay that ended with an error that is none of the user's."""

    exit_status = errors.UNEXPECTED_STATUS


class Process:
    """A process of its own for a run. It ends with this process."""

    def __init__(
        self,
        run: Path,
        flags: Sequence[str],
        folder: Path,
        *,
        code: Path | None = None,
        in_detail: bool = False,
    ):
        """Starts the process, which builds the run before its first command.

        Args:
          run: The directory of the run.
          flags: Arguments of `ddl.main` for config and devices.
          folder: An empty folder of its own.
          code: Folder from which the user's modules are imported; None: as in this process.
          in_detail: Whether it records the values of updates.
        """
        self._run = run
        here = os.getcwd()
        path = sys.path if here in sys.path or "" in sys.path else [here, *sys.path]
        path = [str(code.absolute()), here, *path] if code is not None else path
        spec = folder / "spec.json"
        spec.write_text(
            json.dumps(
                {
                    "path": path,
                    "run": str(run),
                    "flags": list(flags),
                    "folder": str(folder),
                    "in_detail": in_detail,
                }
            )
        )
        self._log = folder / "log"
        packages = str(Path(ddl.__file__).parents[1])
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([packages, os.environ.get("PYTHONPATH", "")]).strip(":"),
            "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2"),
        }
        environment.pop("TF_CONFIG", None)  # the process is alone
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ddl.replay.worker", str(spec)],
                env=environment,
                stdin=subprocess.PIPE,  # closed if this process ends, which ends the other one
                stdout=subprocess.PIPE,
                stderr=output,
                start_new_session=True,
            )

    def send(self, do: str, **arguments: Any) -> None:
        """See `Player`."""
        assert self._process.stdin is not None
        line = json.dumps({"do": do, **arguments}) + "\n"
        with suppress(BrokenPipeError):  # `receive` reports how the process ended
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        """See `Player`."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            raise ReplayFailed(self._end())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            kind = getattr(errors, answer.get("kind", ""), None)
            is_ours = isinstance(kind, type) and issubclass(kind, DdlError)
            raise (kind if is_ours else ReplayFailed)(  # type: ignore[misc]
                f"The replay of {self._run} failed: {answer['error']}"
            )
        return answer

    def close(self) -> None:
        """Ends the process."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end(self) -> str:
        """Returns how the process ended, with the last lines of its log."""
        status = self._process.wait()
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        with self._log.open("rb") as log:
            log.seek(max(log.seek(0, os.SEEK_END) - _LOG_BYTES, 0))
            lines = log.read().decode(errors="replace").strip().splitlines()[-_LAST_LINES:]
        return "\n".join([f"The process that replays {self._run} {how}.", *lines])
