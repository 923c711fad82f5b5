"""Start-up notes for runs on GPUs: rounding, repetition and tensor cores."""

from collections.abc import Sequence

import keras
import tensorflow as tf
from tensorflow.python.framework.config import is_op_determinism_enabled

from ddl.distribution.devices import replica_devices

_MULTIPLE = 8  # numbers of channels, for 2-byte formats on tensor cores


def gpu_notes(strategy: tf.distribute.Strategy, layers: Sequence[keras.layers.Layer]) -> list[str]:
    """Returns notes for a run on GPUs; none without GPUs.

    Args:
      strategy: The strategy of the run.
      layers: The layers that train.
    """
    if not any("GPU" in device.upper() for device in replica_devices(strategy)):
        return []
    return [*_tf32(), *_repetition(), *_tensor_cores(layers)]


def _tf32() -> list[str]:
    policy = keras.config.dtype_policy().name
    if tf.config.experimental.tensor_float_32_execution_enabled():
        if policy == "float64":
            return []
        return [
            "TF32 is on: GPUs from Ampere on round float32 inputs of matrix products and "
            "convolutions to 10 bits of mantissa. --tf32=off computes in float32."
        ]
    if policy != "float32":
        return []
    return [
        "TF32 is off: matrix products and convolutions compute in float32. --tf32=on makes them "
        "several times faster on GPUs from Ampere on, with inputs rounded to 10 bits of mantissa."
    ]


def _repetition() -> list[str]:
    if is_op_determinism_enabled():
        return []
    return [
        "Without --deterministic_ops some operations on GPUs, such as the gradients of biases, add "
        "in varying order: a repeated or resumed run agrees up to rounding, not bit for bit."
    ]


def _tensor_cores(layers: Sequence[keras.layers.Layer]) -> list[str]:
    """Names layers that compute in 2 bytes and have a number of channels that is not 8·n."""
    found: dict[str, int] = {}
    for layer in layers:
        channels = getattr(layer, "filters", None) or getattr(layer, "units", None)
        in_two_bytes = layer.compute_dtype in ("float16", "bfloat16")
        if isinstance(channels, int) and in_two_bytes and channels % _MULTIPLE:
            found[layer.name] = channels
    if not found:
        return []
    named = ", ".join(f"{name} ({channels})" for name, channels in list(found.items())[:5])
    more = f" and {len(found) - 5} more" if len(found) > 5 else ""
    return [
        f"Tensor cores need numbers of channels that are multiples of {_MULTIPLE}; slower layers: "
        f"{named}{more}."
    ]
