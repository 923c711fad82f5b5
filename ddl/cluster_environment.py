"""Which cluster a process belongs to, by its environment, in the one form all else reads.

That is TF_CONFIG. Kubernetes' TFJob, cloud platforms and `ddl.launch` set it. Slurm has variables
of its own, which are turned into it here, before anything of TensorFlow's looks at it.
"""

import json
import os
from collections.abc import Mapping

from tensorflow.python.distribute.cluster_resolver.slurm_cluster_resolver import (
    expand_hostlist,
    expand_tasks_per_node,
)

from ddl.choices import CLUSTERS, ClusterName
from ddl.errors import ConfigError, check_choice

# Below those that Linux gives to outgoing connections, and room for 16 tasks a node.
_FIRST_PORT, _LAST_PORT, _PORTS_A_JOB = 10000, 30000, 16


def join_cluster(name: ClusterName = "auto") -> None:
    """Sets TF_CONFIG in this process's environment, or removes it. Before the strategy is built.

    Args:
      name: `tf_config` takes it as it is; `slurm` makes it of the variables of `srun`; `none` is
        one process alone. `auto` is `tf_config` where that is set, else `slurm` within a step of
        several tasks, else `none`.

    Raises:
      ConfigError: If what is asked for is not there, or says what cannot be.
    """
    check_choice("cluster", name, CLUSTERS)
    if name == "auto":
        name = _found(os.environ)
    if name == "tf_config" and not os.environ.get("TF_CONFIG"):
        raise ConfigError(
            "--cluster=tf_config: there is no environment variable TF_CONFIG. What starts the "
            "workers has to set it; README.md shows how, under 'Several hosts'."
        )
    if name == "slurm":
        os.environ["TF_CONFIG"] = slurm_tf_config(os.environ)
    if name == "none":
        os.environ.pop("TF_CONFIG", None)


def _found(environment: Mapping[str, str]) -> ClusterName:
    if environment.get("TF_CONFIG"):
        return "tf_config"
    # A batch script or a shell of its own has a number in the job too, but is no step of several.
    tasks = environment.get("SLURM_STEP_NUM_TASKS", "1")
    return "slurm" if "SLURM_PROCID" in environment and tasks != "1" else "none"


def slurm_tf_config(environment: Mapping[str, str]) -> str:
    """TF_CONFIG of the task of a Slurm step whose variables are given.

    Workers are numbered as `srun` numbers its tasks, in blocks along the list of nodes.
    TensorFlow's SlurmClusterResolver reads the same variables, and its parsers do so here. But it
    sorts nodes as texts (n10 before n9, so that workers get each other's addresses), fails without
    nvidia-smi, and sets CUDA_VISIBLE_DEVICES, which Slurm has set.

    Raises:
      ConfigError: If they are not those of a step, contradict each other, or number the tasks
        otherwise.
    """
    try:
        hosts = expand_hostlist(environment["SLURM_STEP_NODELIST"])
        counts = expand_tasks_per_node(environment["SLURM_STEP_TASKS_PER_NODE"])
        rank = int(environment["SLURM_PROCID"])
        number = int(environment["SLURM_STEP_NUM_TASKS"])
        node = int(environment["SLURM_NODEID"])
        first_port = _first_port(environment)
    except KeyError as error:
        raise ConfigError(
            f"--cluster=slurm: there is no {error.args[0]} in the environment. Start the workers "
            "with srun; a batch script itself is none."
        ) from error
    except ValueError as error:
        raise ConfigError(f"--cluster=slurm: {error}") from error
    if len(hosts) != len(counts) or sum(counts) != number or not 0 <= rank < number:
        raise ConfigError(
            f"--cluster=slurm: the {number} tasks of the step are not those of its nodes: "
            f"SLURM_STEP_NODELIST={environment['SLURM_STEP_NODELIST']}, "
            f"SLURM_STEP_TASKS_PER_NODE={environment['SLURM_STEP_TASKS_PER_NODE']}, "
            f"SLURM_PROCID={rank}"
        )
    places = [
        (place, first_port + local) for place, count in enumerate(counts) for local in range(count)
    ]
    if places[rank][0] != node:
        raise ConfigError(
            f"--cluster=slurm: task {rank} runs on node {node} of the step, where blocks of tasks "
            f"would have it on node {places[rank][0]}. Start srun with --distribution=block."
        )
    addresses = [f"{hosts[place]}:{port}" for place, port in places]
    return json.dumps({"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}})


def _first_port(environment: Mapping[str, str]) -> int:
    """The first worker's on each node; what `srun --resv-ports` keeps free, where it was given."""
    if reserved := environment.get("SLURM_STEP_RESV_PORTS"):
        return int(reserved.partition("-")[0].partition(",")[0])
    job = int(environment["SLURM_JOB_ID"])
    return _FIRST_PORT + _PORTS_A_JOB * job % (_LAST_PORT - _FIRST_PORT)
