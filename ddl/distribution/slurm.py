"""Selection of the cluster, from TF_CONFIG or from Slurm's variables.

The rest of ddl and TensorFlow read TF_CONFIG only. Kubernetes' TFJob, cloud platforms and
`ddl.launch` set it. Slurm's own variables are converted into TF_CONFIG here, before TensorFlow
reads it.
"""

import json
import os
from collections.abc import Mapping

from ddl.choices import CLUSTERS, ClusterName
from ddl.distribution.tf_config import cluster_role
from ddl.errors import ConfigError, check_choice

# Below the ports that Linux uses for outgoing connections, with room for 16 tasks per node.
_FIRST_PORT, _LAST_PORT, _PORTS_A_JOB = 10000, 30000, 16


def join_cluster(name: ClusterName = "auto") -> None:
    """Sets or removes TF_CONFIG in this process's environment. Must precede `build_strategy`.

    Imports TensorFlow only for a Slurm step.

    Args:
      name: `tf_config` keeps TF_CONFIG as it is; `slurm` builds it from the variables of `srun`;
        `none` removes it, for a single process. `auto` is `tf_config` if TF_CONFIG is set, else
        `slurm` in a Slurm step of several tasks, else `none`.

    Raises:
      ConfigError: If the name is unknown, TF_CONFIG or Slurm's variables are missing, Slurm's
        variables are inconsistent, or TF_CONFIG is malformed.
    """
    name = check_cluster(name)
    if name == "slurm":
        os.environ["TF_CONFIG"] = slurm_tf_config(os.environ)
    if name == "none":
        os.environ.pop("TF_CONFIG", None)
    cluster_role()  # TensorFlow reads TF_CONFIG even for the strategies of one process


def check_cluster(name: ClusterName) -> ClusterName:
    """Checks TF_CONFIG if `join_cluster` would keep it. Imports no TensorFlow.

    Args:
      name: As in `join_cluster`.

    Returns:
      The cluster that "auto" chooses; any other name unchanged.

    Raises:
      ConfigError: If the name is unknown, or TF_CONFIG is malformed or missing.
    """
    check_choice("cluster", name, CLUSTERS)
    if name == "auto":
        name = _found(os.environ)
    if name == "tf_config":
        if not os.environ.get("TF_CONFIG"):
            raise ConfigError(
                "--cluster=tf_config needs the environment variable TF_CONFIG, which is not set. "
                "Set it in the program that starts the workers; see docs/clusters.md, 'Several "
                "hosts'."
            )
        cluster_role()
    return name


def _found(environment: Mapping[str, str]) -> ClusterName:
    if environment.get("TF_CONFIG"):
        return "tf_config"
    # Batch scripts and interactive shells have SLURM_PROCID too, but only one task.
    tasks = environment.get("SLURM_STEP_NUM_TASKS", "1")
    return "slurm" if "SLURM_PROCID" in environment and tasks != "1" else "none"


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
        first_port = _first_port(environment)
    except KeyError as error:
        raise ConfigError(
            f"--cluster=slurm needs the environment variable {error.args[0]}, which is not set. "
            "Start the workers with srun, not in the batch script itself."
        ) from error
    except ValueError as error:
        raise ConfigError(
            "--cluster=slurm needs Slurm's environment variables in the form that srun sets, but "
            f"could not parse them: {error}. Start the workers with srun; if srun set them so, set "
            "TF_CONFIG for each worker and pass --cluster=tf_config."
        ) from error
    if len(hosts) != len(counts) or sum(counts) != number or not 0 <= rank < number:
        raise ConfigError(
            f"--cluster=slurm: the {number} tasks of the step do not match its nodes, got "
            f"SLURM_STEP_NODELIST={environment['SLURM_STEP_NODELIST']}, "
            f"SLURM_STEP_TASKS_PER_NODE={environment['SLURM_STEP_TASKS_PER_NODE']}, "
            f"SLURM_PROCID={rank}. Start the workers with srun."
        )
    places = [
        (place, first_port + local) for place, count in enumerate(counts) for local in range(count)
    ]
    if places[rank][0] != node:
        raise ConfigError(
            f"--cluster=slurm needs tasks in blocks, but task {rank} runs on node {node} of the "
            f"step instead of node {places[rank][0]}. Start srun with --distribution=block."
        )
    addresses = [f"{hosts[place]}:{port}" for place, port in places]
    return json.dumps({"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}})


def _first_port(environment: Mapping[str, str]) -> int:
    """Returns the first worker's port on each node: that of `srun --resv-ports` if reserved."""
    if reserved := environment.get("SLURM_STEP_RESV_PORTS"):
        return int(reserved.partition("-")[0].partition(",")[0])
    job = int(environment["SLURM_JOB_ID"])
    return _FIRST_PORT + _PORTS_A_JOB * job % (_LAST_PORT - _FIRST_PORT)
