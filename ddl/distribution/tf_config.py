"""The role of this process in its cluster, according to TF_CONFIG.

Only this module of ddl parses TF_CONFIG. `ddl.distribution.slurm` sets it from other sources.
TensorFlow's strategies require its own resolvers, which parse TF_CONFIG again.
"""

import dataclasses
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ddl.errors import ConfigError, did_you_mean, either

_FORM = '{"cluster": {"worker": ["host:port", …]}, "task": {"type": "worker", "index": 0}}'
_PLURALS = {"chief": "workers", "worker": "workers", "ps": "parameter servers"}


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
                f"and index {self.index}. It has the form {_FORM}."
            )
        return index


def cluster_role() -> ClusterRole:
    """Parses TF_CONFIG. Without TF_CONFIG the role has no cluster.

    Raises:
      ConfigError: If TF_CONFIG is malformed, or this process is of a kind that the cluster lacks,
        or its index is beyond the list of its kind.
    """
    try:
        config = json.loads(os.environ.get("TF_CONFIG") or "{}")
    except (ValueError, RecursionError) as error:
        raise _malformed(str(error)) from error
    config = _mapping("it", config)
    cluster = {
        kind: _addresses(kind, hosts)
        for kind, hosts in _mapping('"cluster"', config.get("cluster", {})).items()
    }
    _check_distinct(cluster)
    task = _mapping('"task"', config.get("task", {}))
    kind, index = task.get("type", ""), _index(task.get("index", 0))
    if not isinstance(kind, str):
        raise _malformed(f"the type of the task must be a text, got {_shown(kind)}")
    # TensorFlow lets an evaluator stand outside of the cluster.
    if cluster and kind and kind not in cluster and kind != "evaluator":
        names = either(_PLURALS.get(known, known) for known in cluster)
        raise ConfigError(
            f"TF_CONFIG must name this process as one of its {names}, got type {kind!r}."
            f"{did_you_mean(kind, cluster)} It has the form {_FORM}."
        )
    if kind in cluster and index >= len(cluster[kind]):
        raise ConfigError(
            f"TF_CONFIG must name this process as one of its {_PLURALS.get(kind, 'tasks')}, got "
            f"index {index} and {len(cluster[kind])} addresses of type {kind!r}. It has the form "
            f"{_FORM}."
        )
    return ClusterRole(cluster, kind, index)


def _mapping(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    raise _malformed(f"{name} must be an object, got {_shown(value)}")


def _check_distinct(cluster: Mapping[str, Sequence[str]]) -> None:
    """Raises ConfigError for an address given twice, and for a second chief: no such cluster joins.

    Nobody connects to an evaluator, so its address does not matter.
    """
    known: set[str] = set()
    for address in (a for kind, hosts in cluster.items() if kind != "evaluator" for a in hosts):
        if address in known:
            raise _malformed(f"each address must occur once, got {_shown(address)} twice")
        known.add(address)
    if len(cluster.get("chief", [])) > 1:
        raise _malformed(f'"chief" must have one address, got {_shown(cluster["chief"])}')


def _addresses(kind: str, hosts: Any) -> list[str]:
    if not isinstance(hosts, list):
        raise _malformed(f'"{kind}" must be a list of addresses, got {_shown(hosts)}')
    for address in hosts:
        host, colon, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
        is_port = port.isascii() and port.isdecimal() and 0 < int(port[:6]) < 1 << 16
        if not (host and colon and is_port and len(port) < 6) or re.search(r"\s", address):
            raise _malformed(
                f'an address of "{kind}" must be host:port with a port from 1 to 65535, got '
                f"{_shown(address)}"
            )
    return hosts


def _index(value: Any) -> int:
    # Some programs write the index as a text.
    text = str(value) if isinstance(value, int | str) and not isinstance(value, bool) else ""
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise _malformed(
            f"the index of the task must be a whole number from 0 on, got {_shown(value)}"
        )
    return int(text)


def _malformed(what: str) -> ConfigError:
    return ConfigError(
        "The environment variable TF_CONFIG must be a JSON object in TensorFlow's form: "
        f"{what}. An example is {_FORM}. Correct it, or unset it to run on this machine only."
    )


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
