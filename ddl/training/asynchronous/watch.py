"""The chief's watch over the workers and parameter servers of its cluster.

TensorFlow reassigns the updates of a lost worker to the others and readmits the worker when it is
back. But TensorFlow waits forever for a task that neither answers nor dies.
"""

import os
import threading
import time
from typing import NoReturn

from ddl.distribution.addresses import ask, silence
from ddl.distribution.cluster import ClusterTimeouts, cluster_role
from ddl.distribution.parameter_servers import NAMES
from ddl.errors import WorkerLost
from ddl.output import say

_PAUSE = 1.0
# A dead parameter server has lost its weights. These seconds let TensorFlow's pending call raise
# first.
_PATIENCE_WITH_THE_DEAD = 5.0


def watch_tasks(timeouts: ClusterTimeouts) -> None:
    """Probes every worker and parameter server in TF_CONFIG from now on, each in its own thread.

    A lost parameter server, a stopped or unreachable worker, and the loss of all workers end this
    process with the status of WorkerLost, even if its main thread is blocked. A worker that died is
    reported, and training continues on the others.

    Args:
      timeouts: Seconds of silence after which a task is lost.
    """
    cluster, gone = cluster_role().cluster, set[str]()
    for kind in ("ps", "worker"):
        for index, address in enumerate(cluster[kind]):
            given = (kind, index, address, gone, len(cluster["worker"]), timeouts)
            threading.Thread(target=_watch, args=given, daemon=True).start()


def _watch(
    kind: str, index: int, address: str, gone: set[str], workers: int, timeouts: ClusterTimeouts
) -> None:
    """Probes a task; all threads share the addresses of workers that are gone."""
    who, heard = f"{NAMES[kind]} {index} at {address}", time.monotonic()
    dead = timeouts._replace(peer=min(_PATIENCE_WITH_THE_DEAD, timeouts.peer))
    while True:
        answer = ask(address, min(timeouts.peer, timeouts.stall, 10 * _PAUSE))
        refuses = answer == "refuses"
        if answer == "greets" and address in gone:
            gone.discard(address)
            say(f"{who} is back.")
        elif refuses and kind == "worker" and address not in gone:
            gone.add(address)
            say(f"{who} is lost. The other workers compute its updates until it is back.")
        if answer == "greets" or (refuses and kind == "worker" and len(gone) < workers):
            heard = time.monotonic()
        limits = dead if refuses and kind == "ps" else timeouts
        if silent := silence(answer, heard, limits):
            _end(f"{who} {silent}")
        time.sleep(_PAUSE)


def _end(why: str) -> NoReturn:
    """Reports the reason and exits at once: the main thread may be blocked forever."""
    say(f"{why}. Restart all tasks; they resume from the last checkpoint.")
    os._exit(WorkerLost.exit_status)
