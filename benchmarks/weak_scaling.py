"""Weak scaling of two workers, and a model of a larger cluster: python -m benchmarks.weak_scaling.

Two processes, pinned to a core each, train together with a fixed batch per worker, on the network
of the third tutorial and the MLP of the second. The limit without communication is the speed of two
concurrent independent runs of ddl on the same cores, which share caches and memory as workers do. A
scaling of 91% means that an update takes 1 / 0.91 of the time of the independent runs. The
TensorFlow contender is the loop of its tutorial, with a tf.function for each step on
MultiWorkerMirroredStrategy.

What the MLP loses, it loses to its two collectives in equal parts, although one sums a few numbers
and the other the 407 KB of the gradients: without both, two workers are as fast as independent
ones. Each message over gRPC wakes threads on a processor that computes. To gather the sums, a
message less than to reduce them, gains nothing; nor does one float64 buffer for both. One gathered
message for both gains a third of the loss, by functions that are private to TensorFlow.

The model computes the time of a step from compute, bytes, latency and bandwidth. A message of n
bytes takes latency + n / bandwidth. Within a machine of 8 devices an all-reduce is a ring; between
machines halving and doubling (Thakur, Rabenseifner and Gropp 2005, "Optimization of Collective
Communication Operations in MPICH"). A share of it is hidden behind the backward pass, from none to
all that fits. Compute is published: by the third tutorial on one GPU, and by Goyal et al. 2017,
"Accurate, Large Minibatch SGD", for ResNet-50 with 32 images a GPU. Bandwidths come from
specifications: two thirds of PCIe 3.0 x16 for the tutorial, whose links are not named, a link of a
P100 and 50 Gbit/s Ethernet for ResNet-50. Latencies are assumed. ddl has not been measured on
several GPUs. The model leaves out stragglers and jitter, which grow with the number of machines;
congestion; processors that compute and communicate at once; input; and whether so large a global
batch still trains well. These explain published figures below its range.
"""

import dataclasses
import json
import math
import os
from typing import Any, NamedTuple

from benchmarks import harness
from benchmarks.cases import Case
from benchmarks.harness import Cell, Contender, Options, Report, Table, Target, spread
from ddl.launcher.tasks import free_ports

WORKERS = 2
ALONE, DDL, TENSORFLOW = "independent", "ddl", "TensorFlow"


# ------------------------------------------------------------ two workers


CASES = {
    "CNN, 512 per worker": (Case("CNN", 512, 3, examples=8192), 0.91),
    "CNN, 256 per worker": (Case("CNN", 256, 6, examples=8192), 0.90),
    "CNN, 64 per worker": (Case("CNN", 64, 20, examples=8192), 0.72),
    "MLP, 1,024 per worker": (Case("MLP", 1024, 120, examples=8192), 0.80),
}
"""Cases with the batch of a worker, and the least scaling."""


def contender(name: str, case: Case) -> Contender:
    """Returns two processes, pinned to a core each: a cluster, or independent ones."""
    cores = sorted(os.sched_getaffinity(0))
    cluster = {"worker": [f"127.0.0.1:{port}" for port in free_ports(WORKERS)]}
    environments = []
    for index in range(WORKERS):
        config = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})
        core = {"CORE": str(cores[index % len(cores)]), "CUDA_VISIBLE_DEVICES": ""}
        environments.append(core if name == ALONE else core | {"TF_CONFIG": config})
    function = "by_tutorial" if name == TENSORFLOW else "by_ddl"
    if name != ALONE:
        case = dataclasses.replace(case, batch=case.batch * WORKERS, workers=WORKERS)
    return Contender(f"benchmarks.contenders:{function}", case, environments)


# ------------------------------------------------------------ the model of a cluster


class Link(NamedTuple):
    """A link: seconds for an empty message, and bytes per second in each direction."""

    latency: float
    bandwidth: float


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Machines of 8 devices, and the work of each device in a step.

    Attributes:
      inside: Link between the devices of a machine.
      between: Link of each machine to the others.
      compute: Seconds of a step without communication.
      gradient_bytes: Bytes of all gradients.
      backward_share: Share of `compute` that can hide communication.
    """

    inside: Link
    between: Link
    compute: float
    gradient_bytes: float
    backward_share: float = 2 / 3

    def all_reduce(self, replicas: int) -> float:
        """Returns the seconds of an all-reduce; `replicas` is at most 8, or 8 times a number."""
        devices = min(replicas, 8)
        link, size, machines = self.inside, self.gradient_bytes, replicas // devices
        ring = 2 * (devices - 1) * (link.latency + size / devices / link.bandwidth)
        rounds = 2 * math.ceil(math.log2(machines)) * self.between.latency
        return ring + rounds + 2 * (machines - 1) / machines * size / self.between.bandwidth

    def step_time(self, replicas: int, overlap: float) -> float:
        """Returns the seconds of a step that hides a share of its communication, if it fits."""
        communication = self.all_reduce(replicas)
        hidden = min(overlap * communication, self.backward_share * self.compute)
        return self.compute + communication - hidden

    def efficiency(self, replicas: int, overlap: float, base: int = 1) -> float:
        """Returns the speed per replica relative to `base` replicas."""
        return self.step_time(base, overlap) / self.step_time(replicas, overlap)


_PCIE, _NVLINK = Link(20e-6, 10e9), Link(20e-6, 20e9)
_ETHERNET = Link(50e-6, 50e9 / 8)
CNN = Cluster(_PCIE, _ETHERNET, 2048 / 66_176, 4 * 1_199_882)
"""66,176 images a second on one GPU, as the tutorial measured, and 2,048 images per replica."""
RESNET = Cluster(
    _NVLINK, _ETHERNET, 256 * 29 * 3600 / (90 * 1_281_167), 4 * 25_557_032, 0.120 / 0.232
)
"""90 epochs of ImageNet in 29 hours on 8 GPUs; the backward pass takes 0.120 of 0.232 s."""
PUBLISHED: dict[tuple[str, int], float] = {("CNN", 8): 7.36 / 8, ("ResNet-50", 256): 0.90}
"""Efficiencies: Horovod's by the tutorial, from 1 GPU; and by Goyal et al., from 8 GPUs."""


def computed() -> Table:
    """Computes efficiencies of clusters, beside those that were published."""
    rows: list[list[Cell]] = []
    for name, cluster, base in (("CNN", CNN, 1), ("ResNet-50", RESNET, 8)):
        for replicas in (8, 64, 256, 512):
            if replicas > base:
                ends = [100 * cluster.efficiency(replicas, share, base) for share in (0.0, 1.0)]
                known = PUBLISHED.get((name, replicas))
                published = "–" if known is None else 100 * known
                rows.append([f"{name}, {replicas} GPUs / {base}", *ends, published])
    columns = ["efficiency, %", "no overlap", "full overlap", "published"]
    return Table("Larger clusters: computed, not measured", columns, rows)


def measure(options: Options) -> Report:
    """Measures all cases, and computes larger clusters."""
    rows, targets, notes = [], [], []
    for name in options.chosen(CASES):
        case, limit = CASES[name]
        kinds = {kind: contender(kind, case) for kind in (ALONE, DDL, TENSORFLOW)}
        times, failed = harness.compare(kinds, *((1, 1) if options.quick else (3, 5)))
        notes += [f"{name}, {why}." for why in failed]
        scaling: list[Any] = [
            spread(times[ALONE] / times[kind]) if {ALONE, kind} <= times.keys() else "–"
            for kind in (DDL, TENSORFLOW)
        ]
        milliseconds = [spread(times[k], 1e3) if k in times else "–" for k in kinds]
        rows.append([name, *scaling, *milliseconds])
        if scaling[0] != "–":
            targets.append(Target(f"{name}: scaling of ddl", scaling[0], limit))
        if {DDL, TENSORFLOW} <= times.keys():
            faster = spread(times[TENSORFLOW] / times[DDL])
            targets.append(Target(f"{name}: TensorFlow's time / ddl's", faster, 1.0))
    columns = ["", DDL, TENSORFLOW, *(f"ms, {kind}" for kind in (ALONE, DDL, TENSORFLOW))]
    return Report([Table("Scaling of two workers", columns, rows), computed()], targets, notes)


if __name__ == "__main__":
    harness.main(measure)
