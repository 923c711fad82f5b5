"""Where a process of the GPU suite computes: one GPU, parts of one GPU, or several GPUs.

TensorFlow's devices are set once in a process, so each place has a process of its own.
"""

import contextlib
import dataclasses
from collections.abc import Iterator

import tensorflow as tf

from ddl.distribution.devices import configure_devices
from ddl.distribution.path import VIRTUAL_GPU, taking
from ddl.distribution.strategies import build_strategy
from ddl.precision import set_tf32


@dataclasses.dataclass(frozen=True)
class Place:
    """The devices of a process.

    Attributes:
      name: Its name in the command and in the names of files.
      replicas: Number of replicas; None takes each GPU of the machine, at least two.
      is_split: Whether the replicas share GPU 0.
      deterministic: Whether operations are deterministic, as with --deterministic_ops.
      on_cpu: Whether virtual CPU devices take the GPUs' path, to try the suite's own code.
    """

    name: str
    replicas: int | None = 1
    is_split: bool = False
    deterministic: bool = False
    on_cpu: bool = False

    @property
    def device(self) -> str:
        """The first replica's device."""
        return "CPU:0" if self.on_cpu else "GPU:0"

    @contextlib.contextmanager
    def strategy(self) -> Iterator[tf.distribute.Strategy]:
        """Configures the devices, and yields the strategy; the path is taken within the block."""
        set_tf32(False)
        configure_devices(
            num_virtual_devices=self.replicas if self.is_split else None,
            gpus=() if self.on_cpu else None if self.replicas is None else [0],
            deterministic_ops=self.deterministic,
        )
        of_gpu = dataclasses.replace(VIRTUAL_GPU, compiles=False)  # XLA takes long on CPUs
        with taking(of_gpu) if self.on_cpu else contextlib.nullcontext():
            yield build_strategy("one_device" if self.replicas == 1 else "mirrored")


_ALL = (
    Place("one"),
    Place("one_deterministic", deterministic=True),
    Place("virtual_2", 2, is_split=True),
    Place("virtual_2_deterministic", 2, is_split=True, deterministic=True),
    Place("virtual_4", 4, is_split=True),
    Place("several", None),
    Place("several_deterministic", None, deterministic=True),
)
PLACES = {place.name: place for place in _ALL}
