"""The tasks of a cluster on one machine, and the TF_CONFIG of each."""

import contextlib
import dataclasses
import json
import random
import socket
from collections.abc import Mapping, Sequence

_HOST = "127.0.0.1"


@dataclasses.dataclass(frozen=True)
class ClusterTask:
    """One process of a cluster.

    Attributes:
      kind: The task type in TF_CONFIG: worker, chief or ps.
      index: The task index in TF_CONFIG, counted within its type.
      environment: Environment variables set for the process.
    """

    kind: str
    index: int
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        return self.kind if self.kind == "chief" else f"{self.kind} {self.index}"


def cluster_tasks(num_workers: int, num_ps: int = 0) -> list[ClusterTask]:
    """Returns the tasks of a cluster, the leader first.

    Without parameter servers all workers run the same program, and worker 0 leads. With parameter
    servers a chief leads and schedules the steps of the workers.
    """
    sizes = {"chief": min(num_ps, 1), "worker": num_workers, "ps": num_ps}
    return [ClusterTask(kind, index) for kind, size in sizes.items() for index in range(size)]


def tf_configs(tasks: Sequence[ClusterTask], ports: Sequence[int]) -> list[str]:
    """Returns the TF_CONFIG value of each task, given the port that each task listens on."""
    cluster: dict[str, list[str]] = {}
    for task, port in zip(tasks, ports, strict=True):
        cluster.setdefault(task.kind, []).append(f"{_HOST}:{port}")
    names = [{"type": task.kind, "index": task.index} for task in tasks]
    return [json.dumps({"cluster": cluster, "task": name}) for name in names]


def free_ports(count: int) -> list[int]:
    """Returns `count` different free ports.

    They lie below those that systems choose themselves, from 32,768 on: the connection of any
    process could take one of these before its task does. The task then exits with an error.
    """
    ports: set[int] = set()
    while len(ports) < count:
        port = random.SystemRandom().randrange(16_384, 32_768)
        with contextlib.suppress(OSError), socket.create_server((_HOST, port)):
            ports.add(port)
    return [*ports]
