"""Which process of a cluster this is: what TF_CONFIG says, which ddl parses here alone.

`ddl.cluster_environment` makes it of what else there may be. TensorFlow's resolvers, which its
strategies want, parse it by themselves.
"""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence

from ddl.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class ClusterPlace:
    """What TF_CONFIG says.

    Attributes:
      cluster: Addresses, host:port, by kind of task: worker, chief, ps, evaluator.
      kind: Which kind this process is; "" outside of a cluster.
      index: Its number among those of its kind.
    """

    cluster: Mapping[str, Sequence[str]]
    kind: str
    index: int

    @property
    def workers(self) -> list[str]:
        """Addresses of all that train together, the first of whom leads."""
        return [*self.cluster.get("chief", []), *self.cluster.get("worker", [])]

    @property
    def worker_index(self) -> int:
        """Which of `workers` this process is.

        Raises:
          ConfigError: If it is none.
        """
        chiefs = len(self.cluster.get("chief", []))
        first = {"chief": 0, "worker": chiefs}
        index = first.get(self.kind, -1) + self.index
        if self.kind not in first or not 0 <= index < len(self.workers):
            raise ConfigError(
                'TF_CONFIG does not say which worker this is. It has the form {"cluster": {'
                '"worker": ["host:port", …]}, "task": {"type": "worker", "index": 0}}.'
            )
        return index


def cluster_place() -> ClusterPlace:
    """Reads TF_CONFIG; where there is none, the place is in no cluster.

    Raises:
      ConfigError: If it is not of that form.
    """
    try:
        config = json.loads(os.environ.get("TF_CONFIG") or "{}")
        cluster = {kind: [*hosts] for kind, hosts in dict(config.get("cluster", {})).items()}
        task = config.get("task", {})
        return ClusterPlace(cluster, str(task.get("type", "")), int(task.get("index", 0)))
    except (ValueError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"the environment variable TF_CONFIG is not a JSON object as TensorFlow wants it: "
            f"{error}. Correct it, or unset it to run on this machine alone."
        ) from error
