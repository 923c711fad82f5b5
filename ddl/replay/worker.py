"""A process that replays a run: reads commands, and answers each with a line.

    python -m ddl.replay.worker SPEC

SPEC is a JSON file with the fields of `ddl.replay.processes`. A command is a line of JSON on
standard input, and so is its answer on standard output. The user's code prints to standard
error.
"""

import json
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ddl.cli.arguments import parse
from ddl.cli.flags import FLAGS, parse_gpus
from ddl.cli.placing import build_placement
from ddl.config.registry import user_packages
from ddl.errors import DdlError, NotReady
from ddl.replay.replayer import Replayer
from ddl.user_code import attributing_errors, message_of, place_of

_MOST_LINES = 8


def main(spec: Mapping[str, Any]) -> None:
    """Builds the run, and answers commands until standard input is closed."""
    commands = _commands()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.path[:] = spec["path"]
    replayer: Replayer | None = None
    for command in commands:
        try:
            with attributing_errors(user_packages()):
                if replayer is None:
                    replayer = _built(spec)
                answer = replayer.do(**command)
        except Exception as error:
            answer = _failure(error)
        print(json.dumps(answer), file=answers, flush=True)


def _built(spec: Mapping[str, Any]) -> Replayer:
    parse(FLAGS, ["ddl.replay", *spec["flags"]])
    placement = build_placement(parse_gpus(FLAGS.gpus))
    if placement is None:
        raise NotReady("A replay runs in one process. Pass no cluster.")
    folder = Path(spec["folder"])
    return Replayer(Path(spec["run"]), folder, placement, in_detail=spec["in_detail"])


def _failure(error: Exception) -> dict[str, Any]:
    if isinstance(error, DdlError):
        return {"error": str(error), "kind": type(error).__name__}
    where = place_of(error, user_packages())
    lines = message_of(error).splitlines()[:_MOST_LINES]
    lines += [where.note] if where else traceback.format_exc().splitlines()[-_MOST_LINES:]
    return {"error": "\n".join(lines), "kind": ""}


def _commands() -> Iterator[dict[str, Any]]:
    """Yields the commands; ends this process at once when standard input is closed."""
    lines: queue.Queue[str] = queue.Queue()
    given = os.fdopen(os.dup(0), "r")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # a task that reads its standard input finds it empty
    os.close(nothing)

    def read() -> None:
        for line in given:
            lines.put(line)
        os.killpg(0, signal.SIGKILL)  # the process that asked has ended

    threading.Thread(target=read, daemon=True).start()

    def each() -> Iterator[dict[str, Any]]:
        while True:
            yield json.loads(lines.get())

    return each()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
