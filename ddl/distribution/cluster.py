"""The cluster of this process, its role there, and its timeouts.

Kubernetes' TFJob, cloud platforms and `ddl.launch` set TF_CONFIG. Slurm's own variables are
converted into TF_CONFIG here. The rest of ddl asks this module; TensorFlow's strategies parse
TF_CONFIG again. Only a Slurm step imports TensorFlow.
"""

import contextlib
import dataclasses
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ddl.choices import CLUSTERS, ClusterName
from ddl.errors import ConfigError, check_choice, did_you_mean

_FORM = '{"cluster": {"worker": ["host:port", …]}, "task": {"type": "worker", "index": 0}}'

# Below the ports that Linux uses for outgoing connections, with room for 16 tasks per node.
_FIRST_PORT, _LAST_PORT, _PORTS_A_JOB = 10000, 30000, 16


class ClusterTimeouts(NamedTuple):
    """Timeouts between the processes of a cluster, in seconds greater than 0.

    Attributes:
      join: Time for all processes to join at the start.
      peer: Time after which a process is lost if its machine does not answer.
      stall: Time after which a process is lost if it gives no sign of life, for instance because it
        is stopped.
    """

    join: float = 60.0
    peer: float = 30.0
    stall: float = 300.0


@dataclasses.dataclass(frozen=True)
class ClusterRole:
    """Contents of TF_CONFIG.

    Attributes:
      cluster: Addresses, host:port, by kind of task: worker, chief, ps, evaluator.
      kind: Kind of this process; "" outside a cluster.
      index: Number of this process among those of its kind.
    """

    cluster: Mapping[str, Sequence[str]]
    kind: str
    index: int

    @property
    def workers(self) -> list[str]:
        """Addresses of all processes that train together; the first one leads."""
        return [*self.cluster.get("chief", []), *self.cluster.get("worker", [])]

    @property
    def worker_index(self) -> int:
        """Index of this process in `workers`.

        Raises:
          ConfigError: If this process is not one of the workers.
        """
        if self.kind not in ("chief", "worker"):
            raise _misplaced("workers", self.kind, self.index)
        chiefs = len(self.cluster.get("chief", []))
        return self.index + (chiefs if self.kind == "worker" else 0)


def cluster_role() -> ClusterRole:
    """Parses TF_CONFIG. Without TF_CONFIG the role has no cluster.

    Raises:
      ConfigError: If TF_CONFIG is malformed, or this process is of a kind that the cluster lacks,
        or its index is beyond the list of its kind.
    """
    config: Any = os.environ.get("TF_CONFIG") or "{}"
    with contextlib.suppress(ValueError, RecursionError):
        config = json.loads(config)
    _check(isinstance(config, dict), "it must be an object", config)
    cluster, task = config.get("cluster", {}), config.get("task", {})
    _check(isinstance(cluster, dict), '"cluster" must be an object', cluster)
    _check(isinstance(task, dict), '"task" must be an object', task)
    _check_addresses(cluster)
    # Some programs write the index as a text.
    kind, index = task.get("type", ""), str(task.get("index", 0))
    _check(isinstance(kind, str), "the type of the task must be a text", kind)
    is_index = re.fullmatch("[0-9]{1,9}", index)
    _check(is_index, "the index of the task must be a whole number from 0 on", task.get("index"))
    # TensorFlow lets an evaluator stand outside of the cluster.
    has_place = cluster and kind and (kind in cluster or kind != "evaluator")
    if has_place and int(index) >= len(cluster.get(kind, [])):
        raise _misplaced("tasks", kind, int(index), did_you_mean(kind, cluster))
    return ClusterRole(cluster, kind, int(index))


def _check_addresses(cluster: Mapping[str, Any]) -> None:
    """Raises ConfigError for a wrong address, one given twice, and for a second chief.

    Nobody connects to an evaluator, so its address may occur twice.
    """
    connected: list[str] = []
    for kind, hosts in cluster.items():
        _check(isinstance(hosts, list), f'"{kind}" must be a list of addresses', hosts)
        for address in hosts:
            found = re.fullmatch(r"\S+:([1-9][0-9]{0,4})", str(address))
            what = f'an address of "{kind}" must be host:port with a port from 1 to 65535'
            _check(found and int(found[1]) < 1 << 16, what, address)
            _check(address not in connected, "each address must occur once", address)
        connected += hosts if kind != "evaluator" else []
    chiefs = cluster.get("chief", [])
    _check(len(chiefs) < 2, '"chief" must have one address', chiefs)


def _check(is_right: Any, what: str, got: Any) -> None:
    if not is_right:
        shown = json.dumps(got)
        raise ConfigError(
            "The environment variable TF_CONFIG must be a JSON object in TensorFlow's form: "
            f"{what}, got {shown if len(shown) <= 60 else f'{shown[:57]}...'}. An example is "
            f"{_FORM}. Correct it, or unset it to run on this machine only."
        )


def _misplaced(names: str, kind: str, index: int, hint: str = "") -> ConfigError:
    return ConfigError(
        f"TF_CONFIG must name this process as one of its {names}, got type {kind!r} and index "
        f"{index}.{hint} It has the form {_FORM}."
    )


# ---------------------------------------------------------------- choice of the cluster


def join_cluster(name: ClusterName = "auto") -> None:
    """Sets or removes TF_CONFIG in this process's environment. Must precede `build_strategy`.

    Args:
      name: `tf_config` keeps TF_CONFIG as it is; `slurm` builds it from the variables of `srun`;
        `none` removes it, for a single process. `auto` is `tf_config` if TF_CONFIG is set, else
        `slurm` in a Slurm step of several tasks, else `none`.

    Raises:
      ConfigError: If the name is unknown, TF_CONFIG or Slurm's variables are missing, Slurm's
        variables are inconsistent, or TF_CONFIG is malformed.
    """
    check_choice("cluster", name, CLUSTERS)
    is_set = bool(os.environ.get("TF_CONFIG"))
    if name == "auto":
        # Batch scripts and interactive shells have SLURM_PROCID too, but only one task.
        tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
        in_step = "SLURM_PROCID" in os.environ and tasks != "1"
        name = "tf_config" if is_set else "slurm" if in_step else "none"
    if name == "tf_config" and not is_set:
        raise ConfigError(
            "--cluster=tf_config needs the environment variable TF_CONFIG, which is not set. Set "
            "it in the program that starts the workers; see docs/clusters.md, 'Several hosts'."
        )
    if name == "slurm":
        os.environ["TF_CONFIG"] = slurm_tf_config(os.environ)
    if name == "none":
        os.environ.pop("TF_CONFIG", None)
    cluster_role()  # TensorFlow reads TF_CONFIG even for the strategies of one process


def slurm_tf_config(environment: Mapping[str, str]) -> str:
    """Builds TF_CONFIG, a JSON text, for a task of a Slurm step.

    Workers are numbered as `srun` numbers its tasks, in blocks along the list of nodes.
    TensorFlow's SlurmClusterResolver reads the same variables, and this function uses its parsers.
    The resolver itself is unsuitable: it sorts nodes as text (n10 before n9, so that workers get
    each other's addresses), fails without nvidia-smi, and sets CUDA_VISIBLE_DEVICES, which Slurm
    has set.

    Args:
      environment: The environment variables of the task.

    Raises:
      ConfigError: If variables of a step are missing, malformed or inconsistent, or tasks are not
        numbered in blocks.
    """
    from tensorflow.python.distribute.cluster_resolver.slurm_cluster_resolver import (
        expand_hostlist,
        expand_tasks_per_node,
    )

    try:
        hosts = expand_hostlist(environment["SLURM_STEP_NODELIST"])
        counts = expand_tasks_per_node(environment["SLURM_STEP_TASKS_PER_NODE"])
        rank = int(environment["SLURM_PROCID"])
        number = int(environment["SLURM_STEP_NUM_TASKS"])
        node = int(environment["SLURM_NODEID"])
        places = [(place, local) for place, count in enumerate(counts) for local in range(count)]
        if len(hosts) != len(counts) or len(places) != number or not 0 <= rank < number:
            raise ValueError(f"{number} tasks with number {rank} among them do not match the nodes")
        if places[rank][0] != node:
            raise ValueError(
                f"task {rank} runs on node {node} of the step instead of node {places[rank][0]}, "
                "so tasks are not in blocks (--distribution=block)"
            )
        port = _first_port(environment)
    except (KeyError, ValueError) as error:
        raise ConfigError(
            "--cluster=slurm needs the environment variables SLURM_JOB_ID, SLURM_STEP_NODELIST, "
            "SLURM_STEP_TASKS_PER_NODE, SLURM_STEP_NUM_TASKS, SLURM_PROCID and SLURM_NODEID as "
            f"srun --distribution=block sets them, got {type(error).__name__}: {error}. Start the "
            "workers with it; if it set them so, set TF_CONFIG for each and pass "
            "--cluster=tf_config."
        ) from error
    workers = [f"{hosts[place]}:{port + local}" for place, local in places]
    return json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}})


def _first_port(environment: Mapping[str, str]) -> int:
    """Returns the first worker's port on each node: that of `srun --resv-ports` if reserved."""
    if reserved := environment.get("SLURM_STEP_RESV_PORTS"):
        return int(re.split("[-,]", reserved)[0])
    job = int(environment["SLURM_JOB_ID"])
    return _FIRST_PORT + _PORTS_A_JOB * job % (_LAST_PORT - _FIRST_PORT)
