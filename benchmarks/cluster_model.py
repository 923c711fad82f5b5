"""A model of the step time on a cluster, from compute, bytes, latency and bandwidth.

Communication follows Hockney's model: a message of n bytes takes latency + n / bandwidth. An
all-reduce consists of rounds of such messages (Thakur, Rabenseifner and Gropp 2005, "Optimization
of Collective Communication Operations in MPICH"; Patarasuk and Yuan 2009, "Bandwidth optimal
all-reduce algorithms for clusters of workstations"):

- ring, S bytes over n devices: 2 (n - 1) rounds of S / n bytes each.
- halving and doubling, over n: 2 ⌈log₂ n⌉ rounds, and 2 (n - 1) / n · S bytes in total.
- hierarchical: the devices of a machine reduce-scatter in a ring, so that each holds a part; the
  machines all-reduce these parts, each machine through its one link; the devices all-gather the
  result.

A part of the communication is hidden behind the backward pass, since the gradients of the last
layers are ready first.

The model leaves out stragglers and jitter, which grow with the number of machines, since all wait
for the slowest; congestion in switches; processors that both compute and send; input, checkpoints
and evaluation; and whether a global batch of that size still trains well.
"""

import dataclasses
import math
from typing import Literal

import numpy as np


@dataclasses.dataclass(frozen=True)
class Link:
    """A link between two devices or machines.

    Attributes:
      latency: Seconds for an empty message.
      bandwidth: Bytes per second in each direction; full duplex.
    """

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        if self.latency < 0 or self.bandwidth <= 0:
            raise ValueError(
                f"latency must be at least 0 and bandwidth greater than 0, got {self}."
            )


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Machines with equal devices.

    Attributes:
      inside: Link between the devices of a machine.
      between: Link of each machine to the others; None for a single machine.
      devices: Number of devices of each machine.
    """

    inside: Link
    between: Link | None = None
    devices: int = 8


@dataclasses.dataclass(frozen=True)
class Work:
    """Work of each replica in a step.

    Attributes:
      compute: Seconds of a step without communication.
      gradient_bytes: Bytes of all gradients.
      backward_share: Share of `compute` that can hide communication, 0 to 1.
    """

    compute: float
    gradient_bytes: float
    backward_share: float = 2 / 3


Algorithm = Literal["ring", "halving_doubling", "hierarchical"]


def ring(size: float, n: int, link: Link) -> float:
    """Returns the seconds of a ring all-reduce of `size` bytes over n devices."""
    return 2 * (n - 1) * (link.latency + size / n / link.bandwidth)


def halving_doubling(size: float, n: int, link: Link) -> float:
    """Returns the seconds of a halving-doubling all-reduce of `size` bytes over n devices."""
    if n == 1:
        return 0.0
    return 2 * math.ceil(math.log2(n)) * link.latency + 2 * (n - 1) / n * size / link.bandwidth


def all_reduce(size: float, replicas: int, cluster: Cluster, algorithm: Algorithm) -> float:
    """Returns the seconds of an all-reduce of `size` bytes over the first `replicas` devices.

    Raises:
      ValueError: If a machine would be partly used, or the machines have no link.
    """
    if replicas <= cluster.devices:
        return ring(size, replicas, cluster.inside)
    machines, rest = divmod(replicas, cluster.devices)
    if rest:
        raise ValueError(
            f"The number of replicas must be a multiple of the {cluster.devices} devices of a "
            f"machine, got {replicas}."
        )
    if cluster.between is None:
        raise ValueError(
            f"{replicas} replicas need {machines} machines, but Cluster.between is None. "
            "Set it to a link."
        )
    if algorithm == "ring":
        # One ring through all devices; the slowest link determines the time of each round.
        slowest = Link(
            max(cluster.inside.latency, cluster.between.latency),
            min(cluster.inside.bandwidth, cluster.between.bandwidth),
        )
        return ring(size, replicas, slowest)
    # The first half of a ring is the reduce-scatter, the second half the all-gather.
    inside = ring(size, cluster.devices, cluster.inside)
    between = ring if algorithm == "hierarchical" else halving_doubling
    return inside + between(size, machines, cluster.between)


def step_time(
    work: Work, replicas: int, cluster: Cluster, algorithm: Algorithm, overlap: float
) -> float:
    """Returns the seconds of a step.

    Args:
      work: Work of each replica.
      replicas: Number of replicas.
      cluster: The cluster they run on.
      algorithm: "ring" is one ring through all devices. "hierarchical" and "halving_doubling"
        reduce within each machine in a ring, and between the machines by a ring or by halving and
        doubling.
      overlap: Share of the communication that can be hidden, 0 to 1. The backward pass limits the
        hidden time.

    Raises:
      ValueError: If `overlap` is out of range, or as in `all_reduce`.
    """
    if not 0 <= overlap <= 1:
        raise ValueError(f"overlap must be from 0 to 1, got {overlap}.")
    communication = all_reduce(work.gradient_bytes, replicas, cluster, algorithm)
    hidden = min(overlap * communication, work.backward_share * work.compute)
    return work.compute + communication - hidden


def efficiency(
    work: Work, replicas: int, cluster: Cluster, algorithm: Algorithm, overlap: float, base: int = 1
) -> float:
    """Returns the weak-scaling efficiency: speed per replica relative to `base` replicas."""
    return step_time(work, base, cluster, algorithm, overlap) / step_time(
        work, replicas, cluster, algorithm, overlap
    )


def fit_link(sizes: list[float], seconds: list[float], n: int) -> Link:
    """Fits the link of a ring over n devices to measured all-reduces.

    Minimizes the squares of the relative errors, so that small messages count as much as large
    ones. Latency and bandwidth are positive.

    Args:
      sizes: Bytes of each all-reduce.
      seconds: Measured seconds of each all-reduce.
      n: Number of devices in the ring.
    """
    sizes_, times = np.array(sizes), np.array(seconds)
    columns = np.stack([np.full(len(times), 2.0 * (n - 1)), 2 * (n - 1) / n * sizes_], axis=1)
    (latency, per_byte), *_ = np.linalg.lstsq(columns / times[:, None], np.ones(len(times)))
    return Link(max(float(latency), 0.0), 1 / max(float(per_byte), 1e-15))
