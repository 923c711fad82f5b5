"""The role of this process in its cluster, according to TF_CONFIG.

Only this module of ddl parses TF_CONFIG. `ddl.distribution.slurm` sets it from other sources.
TensorFlow's strategies require its own resolvers, which parse TF_CONFIG again.
"""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence

from ddl.errors import ConfigError


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
        chiefs = len(self.cluster.get("chief", []))
        first = {"chief": 0, "worker": chiefs}
        index = first.get(self.kind, -1) + self.index
        if self.kind not in first or not 0 <= index < len(self.workers):
            raise ConfigError(
                f"TF_CONFIG must name this process as one of its workers, got type {self.kind!r} "
                f"and index {self.index}. It has the form "
                '{"cluster": {"worker": ["host:port", …]}, "task": {"type": "worker", "index": 0}}.'
            )
        return index


def cluster_role() -> ClusterRole:
    """Parses TF_CONFIG. Without TF_CONFIG the role has no cluster.

    Raises:
      ConfigError: If TF_CONFIG is malformed.
    """
    try:
        config = json.loads(os.environ.get("TF_CONFIG") or "{}")
        cluster = {kind: [*hosts] for kind, hosts in dict(config.get("cluster", {})).items()}
        task = config.get("task", {})
        return ClusterRole(cluster, str(task.get("type", "")), int(task.get("index", 0)))
    except (ValueError, AttributeError, TypeError) as error:
        raise ConfigError(
            "The environment variable TF_CONFIG must be a JSON object in TensorFlow's form: "
            f"{error}. Correct it, or unset it to run on this machine only."
        ) from error
