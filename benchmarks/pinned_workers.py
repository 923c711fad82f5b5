"""Workers of one cluster, or independent processes, each pinned to a core of this machine."""

import functools
import json
import os
from collections.abc import Sequence
from typing import Any

from benchmarks.turns import Contender

WORKERS = 2


class PinnedWorkers:
    """Processes that compute at the same time, as a cluster or, if `alone`, independently."""

    def __init__(self, entry: str, cases: Sequence[Any], alone: bool, **environment: str) -> None:
        """Starts the processes.

        Args:
          entry: "module:name" of the contender's function.
          cases: Cases in the order in which the processes run them.
          alone: Whether the processes train independently.
          **environment: Further environment variables of the processes.
        """
        from ddl.launcher.tasks import free_ports

        cluster = {"worker": [f"127.0.0.1:{port}" for port in free_ports(WORKERS)]}
        cores = sorted(os.sched_getaffinity(0))
        self._workers = []
        for index in range(WORKERS):
            config = {"cluster": cluster, "task": {"type": "worker", "index": index}}
            of_worker = {
                "CORE": str(cores[index % len(cores)]),
                "TF_CONFIG": "" if alone else json.dumps(config),
                "TF_CPP_MIN_LOG_LEVEL": "3",
                "CUDA_VISIBLE_DEVICES": "",
            }
            self._workers.append(Contender(entry, cases, of_worker | environment))

    def windows(self) -> list[Any]:
        """Runs a window on all workers at once and returns the figure of each."""
        for worker in self._workers:
            worker.start_window()
        return [worker.end_window() for worker in self._workers]

    def next_case(self) -> None:
        """Ends the case."""
        for worker in self._workers:
            worker.next_case()

    def close(self) -> None:
        """Kills the processes."""
        for worker in self._workers:
            worker.close()


# ------------------------------------------------------------ in a worker's process


def pin() -> None:
    """Pins this process to its core. Call it before TensorFlow starts its threads."""
    os.sched_setaffinity(0, {int(os.environ["CORE"])})


@functools.cache
def strategy_of_process() -> Any:
    """Builds the strategy of this worker, on its core."""
    pin()
    from ddl import distribution

    name = "multi_worker_mirrored" if os.environ["TF_CONFIG"] else "one_device"
    return distribution.build_strategy(name)
