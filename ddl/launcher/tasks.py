"""The tasks of a cluster on one machine, and the TF_CONFIG of each."""

import contextlib
import dataclasses
import json
import socket
from collections.abc import Sequence

_HOST = "127.0.0.1"


@dataclasses.dataclass(frozen=True)
class ClusterTask:
    """One process of a cluster.

    Attributes:
      kind: The task type in TF_CONFIG: worker, chief or ps.
      index: The task index in TF_CONFIG, counted within its type.
    """

    kind: str
    index: int

    def __str__(self) -> str:
        return self.kind if self.kind == "chief" else f"{self.kind} {self.index}"


def cluster_tasks(num_workers: int, num_ps: int = 0) -> list[ClusterTask]:
    """Returns the tasks of a cluster, the leader first.

    Without parameter servers all workers run the same program, and worker 0 leads. With parameter
    servers a chief leads and schedules the steps of the workers.
    """
    sizes = {"worker": num_workers}
    if num_ps:
        sizes = {"chief": 1, "worker": num_workers, "ps": num_ps}
    return [ClusterTask(kind, index) for kind, size in sizes.items() for index in range(size)]


def tf_configs(tasks: Sequence[ClusterTask], ports: Sequence[int]) -> list[str]:
    """Returns the TF_CONFIG value of each task, given the port that each task listens on."""
    cluster: dict[str, list[str]] = {}
    for task, port in zip(tasks, ports, strict=True):
        cluster.setdefault(task.kind, []).append(f"{_HOST}:{port}")
    return [
        json.dumps({"cluster": cluster, "task": {"type": task.kind, "index": task.index}})
        for task in tasks
    ]


def free_ports(count: int) -> list[int]:
    """Returns `count` different free ports.

    Another process may take a port before its task does. The task then exits with an error.
    """
    with contextlib.ExitStack() as stack:
        # All sockets stay bound until the last port is found, so that no port is found twice.
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((_HOST, 0))
        return [one.getsockname()[1] for one in sockets]
