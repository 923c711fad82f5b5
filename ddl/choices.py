"""The closed sets of names that flags and arguments take, readable without TensorFlow."""

from typing import Literal, get_args

StrategyName = Literal[
    "auto",
    "one_device",
    "mirrored",
    "multi_worker_mirrored",
    "parameter_server",
    "central_storage",
    "tpu",
]
CrossDeviceOps = Literal["auto", "nccl", "hierarchical_copy", "reduction_to_one_device"]
Mode = Literal["train_and_eval", "train", "eval", "export"]
Pin = Literal["none", "cores", "gpus"]

STRATEGIES: tuple[str, ...] = get_args(StrategyName)
CROSS_DEVICE_OPS: tuple[str, ...] = get_args(CrossDeviceOps)
MODES: tuple[str, ...] = get_args(Mode)
PINS: tuple[str, ...] = get_args(Pin)
