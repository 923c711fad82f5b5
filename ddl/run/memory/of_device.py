"""The memory that a device has for each replica."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import tensorflow as tf

from ddl.devices.replicas import replica_devices
from ddl.distribution.tf_config import cluster_role
from ddl.distribution.workers import Workers
from ddl.run.timing.machine import Gpus

_LIMITS_OF_GROUP = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
"""Linux's files with the memory that a container may take."""


class Available(NamedTuple):
    """Memory for a replica.

    Attributes:
      bytes: The bytes; None if nothing tells them.
      text: Where they come from.
    """

    bytes: int | None
    text: str


def available_to_replica(strategy: tf.distribute.Strategy, limit: int | None) -> Available:
    """Returns the memory that the device of this process's first replica has for each replica.

    Args:
      strategy: The strategy.
      limit: `--memory_limit` in MiB: the memory of the process on CPUs, else of a GPU; or None.
    """
    devices = replica_devices(strategy)
    if ":GPU:" in devices[0].upper():
        return _of_gpu(devices[0], limit)
    return _of_host(len(devices), 1 if limit else _workers_here(strategy), limit)


def _of_gpu(device: str, limit: int | None) -> Available:
    if limit is not None:
        return Available(limit << 20, "--memory_limit")
    place = [_plain(gpu.name) for gpu in tf.config.list_logical_devices("GPU")].index(
        _plain(device)
    )
    for gpu in tf.config.get_visible_devices("GPU"):
        parts = tf.config.get_logical_device_configuration(gpu) or [None]
        if place < len(parts):
            part = parts[place]
            if part is not None and part.memory_limit:
                return Available(int(part.memory_limit) << 20, "of the virtual GPU")
            total = Gpus([gpu.name]).total_bytes()
            if total:
                return Available(next(iter(total.values())), "of the GPU")
            break
        place -= len(parts)
    return Available(
        None, "unknown: install nvidia-ml-py, or pass the memory of a GPU in MiB, --memory_limit=N"
    )


def _plain(device: str) -> str:
    """Returns the name of a device within its process, such as "GPU:0"."""
    return device.rpartition("device:")[2]


def _of_host(replicas: int, workers: int, limit: int | None) -> Available:
    if limit is not None:
        whole, name = limit << 20, f"--memory_limit={limit}"
    else:
        whole = min([memory_of_host(), *_limits_of_group()])
        name = f"{whole / 1e9:,.3g} GB of the host"
    several = replicas * workers
    shared = f", for each of the {several} replicas of this {'process' if limit else 'host'}"
    return Available(whole // several, f"{name}{shared if several > 1 else ''}")


def memory_of_host() -> int:
    """Returns the bytes of this machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _limits_of_group(files: Sequence[Path] = _LIMITS_OF_GROUP) -> list[int]:
    """Returns the limits of the container of this process, if there are any."""
    found = []
    for file in files:
        try:
            found.append(int(file.read_text()))
        except (OSError, ValueError):  # "max", or no such file
            continue
    return found


def _workers_here(strategy: tf.distribute.Strategy) -> int:
    """Returns the number of workers on this host, by the addresses in TF_CONFIG."""
    if Workers(strategy).number == 1:
        return 1
    return workers_beside(cluster_role().cluster, Workers(strategy).index)


def workers_beside(cluster: Mapping[str, Sequence[str]], index: int) -> int:
    """Returns the number of workers at the address of a worker, itself included.

    Args:
      cluster: The addresses of each kind of process.
      index: Index of the worker, the chief first.
    """
    workers = [*cluster.get("chief", ()), *cluster.get("worker", ())]
    hosts = [address.rpartition(":")[0] for address in workers]
    return hosts.count(hosts[index]) if index < len(hosts) else 1
