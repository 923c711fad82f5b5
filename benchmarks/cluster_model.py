"""The time of a step on a cluster, from compute, bytes, latency and bandwidth.

The model of communication is Hockney's: a message of n bytes takes latency + n / bandwidth. An
all-reduce is made of rounds of such messages (Thakur, Rabenseifner and Gropp 2005, "Optimization of
Collective Communication Operations in MPICH"; Patarasuk and Yuan 2009, "Bandwidth optimal
all-reduce algorithms for clusters of workstations"):

- ring, over n: 2 (n - 1) rounds of S / n bytes each.
- halving and doubling, over n: 2 ⌈log₂ n⌉ rounds, and 2 (n - 1) / n · S bytes in all.
- hierarchical: the devices of a machine add up among themselves in a ring, so that each holds a
  part; machines exchange these parts, all through the one link of each; the devices share the
  result.

A part of the communication is hidden behind the backward pass, since gradients of late layers are
there first.

What it cannot say: stragglers and jitter, which grow with the number of machines, since all wait
for the slowest; congestion in switches; processors that do both the computing and the sending;
input, checkpoints and evaluation; and whether a global batch of that size still trains well.
"""

import dataclasses
import math
from typing import Literal

import numpy as np


@dataclasses.dataclass(frozen=True)
class Link:
    """A way between two devices or machines.

    Attributes:
      latency: Seconds that a message takes however short it is.
      bandwidth: Bytes a second, in each direction at once.
    """

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        if self.latency < 0 or self.bandwidth <= 0:
            raise ValueError(f"{self}: latency is 0 or more, bandwidth more than 0")


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Machines of equal devices.

    Attributes:
      inside: Between the devices of a machine.
      between: Of each machine to the others; None for one machine only.
      devices: Of each machine.
    """

    inside: Link
    between: Link | None = None
    devices: int = 8


@dataclasses.dataclass(frozen=True)
class Work:
    """What each replica does in a step.

    Attributes:
      compute: Seconds of a step without any communication.
      gradient_bytes: Bytes of all gradients.
      backward_share: The share of `compute` behind which communication can be hidden.
    """

    compute: float
    gradient_bytes: float
    backward_share: float = 2 / 3


Algorithm = Literal["ring", "halving_doubling", "hierarchical"]


def ring(size: float, n: int, link: Link) -> float:
    """Seconds of an all-reduce of `size` bytes over n in a ring."""
    return 2 * (n - 1) * (link.latency + size / n / link.bandwidth)


def halving_doubling(size: float, n: int, link: Link) -> float:
    """Seconds of an all-reduce of `size` bytes over n by halving and doubling."""
    if n == 1:
        return 0.0
    return 2 * math.ceil(math.log2(n)) * link.latency + 2 * (n - 1) / n * size / link.bandwidth


def all_reduce(size: float, replicas: int, cluster: Cluster, algorithm: Algorithm) -> float:
    """Seconds of an all-reduce of `size` bytes over the first `replicas` devices.

    Raises:
      ValueError: If machines would be partly used, or there is no link between them.
    """
    if replicas <= cluster.devices:
        return ring(size, replicas, cluster.inside)
    machines, rest = divmod(replicas, cluster.devices)
    if rest:
        raise ValueError(f"{replicas} replicas do not fill machines of {cluster.devices}")
    if cluster.between is None:
        raise ValueError(f"{replicas} replicas need {machines} machines; there is no link between")
    if algorithm == "ring":
        # One ring through all; each round is as slow as the slowest of its links.
        slowest = Link(
            max(cluster.inside.latency, cluster.between.latency),
            min(cluster.inside.bandwidth, cluster.between.bandwidth),
        )
        return ring(size, replicas, slowest)
    # A ring's first half adds up, its second half shares.
    inside = ring(size, cluster.devices, cluster.inside)
    between = ring if algorithm == "hierarchical" else halving_doubling
    return inside + between(size, machines, cluster.between)


def step_time(
    work: Work, replicas: int, cluster: Cluster, algorithm: Algorithm, overlap: float
) -> float:
    """Seconds of a step.

    Args:
      work: Of each replica.
      replicas: How many.
      cluster: Where.
      algorithm: "ring" through all devices, or machine by machine and between the machines a
        ring ("hierarchical") or "halving_doubling".
      overlap: The share of the communication that can be hidden, 0 to 1; no more than the
        backward pass takes.
    """
    if not 0 <= overlap <= 1:
        raise ValueError(f"overlap is {overlap}; it lies between 0 and 1")
    communication = all_reduce(work.gradient_bytes, replicas, cluster, algorithm)
    hidden = min(overlap * communication, work.backward_share * work.compute)
    return work.compute + communication - hidden


def efficiency(
    work: Work, replicas: int, cluster: Cluster, algorithm: Algorithm, overlap: float, base: int = 1
) -> float:
    """Speed a replica, of that with `base` replicas: weak scaling, the batch a replica is fixed."""
    return step_time(work, base, cluster, algorithm, overlap) / step_time(
        work, replicas, cluster, algorithm, overlap
    )


def fit_link(sizes: list[float], seconds: list[float], n: int) -> Link:
    """The link whose ring over n comes nearest to measured all-reduces.

    Least squares of relative errors, so that small messages count as much as large ones; latency
    and bandwidth are positive.
    """
    sizes_, times = np.array(sizes), np.array(seconds)
    columns = np.stack([np.full(len(times), 2.0 * (n - 1)), 2 * (n - 1) / n * sizes_], axis=1)
    (latency, per_byte), *_ = np.linalg.lstsq(columns / times[:, None], np.ones(len(times)))
    return Link(max(float(latency), 0.0), 1 / max(float(per_byte), 1e-15))
