"""The commands that processes were started with; /proc does not show those of forked ones."""

import json
import os
import tempfile
from pathlib import Path

# The same in all processes, also in one that starts while a test has changed TMPDIR.
_FOLDER = Path(
    os.environ.setdefault(
        "DDL_TESTS_COMMANDS", f"{tempfile.gettempdir()}/ddl-tests-{os.getuid()}-commands"
    )
)


def remember(number: int, arguments: list[str], environment: dict[str, str]) -> None:
    """Keeps the command line and TF_CONFIG of a process until another has its ID."""
    _FOLDER.mkdir(exist_ok=True)
    content = json.dumps([_birth(number), arguments, environment.get("TF_CONFIG", "")])
    # In one go: a process that is killed while it writes would leave a part.
    partial = _FOLDER / f"{number}.{os.getpid()}.partial"
    partial.write_text(content)
    partial.replace(_FOLDER / str(number))


def running() -> dict[int, tuple[list[str], str]]:
    """Returns the command line and TF_CONFIG of each running process that was forked, by its ID."""
    found = {}
    for file in _FOLDER.glob("[0-9]*[0-9]"):
        try:
            birth, arguments, environment = json.loads(file.read_text())
            if birth == _birth(int(file.name)):
                found[int(file.name)] = arguments, environment
        except OSError:  # it has ended
            continue
    return found


def _birth(number: int) -> str:
    """Returns when a process began, in clock ticks since the machine did."""
    return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[19]
