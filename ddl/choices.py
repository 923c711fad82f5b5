"""Allowed values and a default of flags and arguments. Imports no TensorFlow."""

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
Collectives = Literal["auto", "ring", "nccl"]
Mode = Literal["train_and_eval", "train", "eval", "export", "predict"]
Pin = Literal["none", "cores", "gpus"]
JitCompile = Literal["off", "auto", "on"]
ClusterName = Literal["auto", "tf_config", "slurm", "none"]
SanityMode = Literal["overfit_batch", "fast_run"]

STRATEGIES: tuple[str, ...] = get_args(StrategyName)
CROSS_DEVICE_OPS: tuple[str, ...] = get_args(CrossDeviceOps)
COLLECTIVES: tuple[str, ...] = get_args(Collectives)
MODES: tuple[str, ...] = get_args(Mode)
PINS: tuple[str, ...] = get_args(Pin)
JIT_COMPILE: tuple[str, ...] = get_args(JitCompile)
CLUSTERS: tuple[str, ...] = get_args(ClusterName)
SANITY_MODES: tuple[str, ...] = get_args(SanityMode)

PREDICTIONS = (".jsonl", ".npz", ".parquet")

# Bytes. Large enough that latency does not dominate a transfer, small enough that a model with
# 100 MB of gradients sends most of them while the backward pass computes the others.
BYTES_PER_PACK = 32 << 20
