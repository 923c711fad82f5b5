"""The share of the devices' peak rate that the products of a model take (MFU).

Chowdhery et al. 2022, "PaLM: Scaling Language Modeling with Pathways", appendix B.
"""

from typing import NamedTuple

import keras
import tensorflow as tf

from ddl.devices.peak_rates import peak_of
from ddl.distribution.traits import traits_of
from ddl.figures import MFU
from ddl.training.trainer import Trainer


class Peak(NamedTuple):
    """The peak rate of the device of a replica.

    Attributes:
      rate: Floating-point operations per second.
      source: Where the rate is from.
    """

    rate: float
    source: str


def peak_of_replica(trainer: Trainer, tflops: float | None) -> Peak | None:
    """Returns the peak rate of the device of a replica; None if it is not known.

    Args:
      trainer: The trainer.
      tflops: The stated rate in 10^12 operations per second; None looks the GPU up in a table.
    """
    if tflops is not None:
        return Peak(tflops * 1e12, "as stated")
    gpus = tf.config.get_visible_devices("GPU")
    names = {tf.config.experimental.get_device_details(gpu).get("device_name", "") for gpu in gpus}
    # Virtual GPUs share one; parts of a GPU (MIG) have a part of its rate.
    shared = len(tf.config.list_logical_devices("GPU")) > len(gpus)
    if len(names) != 1 or shared or "MIG" in (name := names.pop()):
        return None
    precision = keras.config.dtype_policy().name
    if precision == "float32" and tf.config.experimental.tensor_float_32_execution_enabled():
        precision = "tf32"
    rate = peak_of(name, precision)
    return None if rate is None else Peak(rate, f"{name}, {precision}, NVIDIA's data sheet")


class Utilization:
    """The MFU of a run.

    Attributes:
      line: A line about the operations and the peak; None if nothing is known of a peak.
    """

    def __init__(self, trainer: Trainer, peak: Peak | None):
        """Reads the operations of a traced trainer.

        Args:
          trainer: The trainer.
          peak: The peak rate of the device of a replica; None if it is not known.
        """
        self.line: str | None = None
        self._share_of_a_step: float | None = None
        flops, replicas = trainer.model_flops, trainer.strategy.num_replicas_in_sync
        if peak is None or traits_of(trainer.strategy).asynchronous:
            return
        if flops is None:
            self.line = (
                "There is no mfu: the matrix products and convolutions of an update cannot be "
                f"counted: {trainer.reason_without_flops}."
            )
            return
        self._share_of_a_step = flops / replicas / peak.rate
        self.line = (
            f"mfu: an update has {flops:.4g} floating-point operations in matrix products and "
            f"convolutions, forward and backward; the peak of a replica is {peak.rate:.4g} a "
            f"second ({peak.source})."
        )

    def figures(self, steps_per_second: float) -> dict[str, float]:
        """Returns the figure "mfu", a share of 1; nothing if it is not known."""
        if self._share_of_a_step is None:
            return {}
        return {MFU: steps_per_second * self._share_of_a_step}
