"""The tasks of a cluster on one machine, and TF_CONFIG, which tells each of them its place."""

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
      kind: What TF_CONFIG calls its type: worker, chief or ps.
      index: Its number among those of its kind.
    """

    kind: str
    index: int

    def __str__(self) -> str:
        return self.kind if self.kind == "chief" else f"{self.kind} {self.index}"


def cluster_tasks(num_workers: int, num_ps: int = 0) -> list[ClusterTask]:
    """The tasks of a cluster, the one that leads it first.

    Without parameter servers the workers are equals, and worker 0 leads. With them a chief does,
    which gives the workers their work.
    """
    sizes = {"worker": num_workers}
    if num_ps:
        sizes = {"chief": 1, "worker": num_workers, "ps": num_ps}
    return [ClusterTask(kind, index) for kind, size in sizes.items() for index in range(size)]


def tf_configs(tasks: Sequence[ClusterTask], ports: Sequence[int]) -> list[str]:
    """The value of TF_CONFIG for each task, which listens on its port of this machine."""
    cluster: dict[str, list[str]] = {}
    for task, port in zip(tasks, ports, strict=True):
        cluster.setdefault(task.kind, []).append(f"{_HOST}:{port}")
    return [
        json.dumps({"cluster": cluster, "task": {"type": task.kind, "index": task.index}})
        for task in tasks
    ]


def free_ports(count: int) -> list[int]:
    """So many different ports that nobody listens on.

    Somebody else may take one before its task does. That task then ends with an error.
    """
    with contextlib.ExitStack() as stack:
        # All are held until the last is found, so that none is found twice.
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((_HOST, 0))
        return [one.getsockname()[1] for one in sockets]
