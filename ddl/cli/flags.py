"""The flags of `ddl.main`, shared with other commands. Imports no TensorFlow."""

from collections.abc import Iterable
from typing import Literal

from absl import flags

from ddl.choices import (
    BYTES_PER_PACK,
    CLUSTERS,
    COLLECTIVES,
    CROSS_DEVICE_OPS,
    JIT_COMPILE,
    MODES,
    STRATEGIES,
)

FLAGS = flags.FLAGS

# The flags that load a config, which all commands with a config have.
OF_CONFIG = ("gin_file", "gin_param", "gin_bindings", "gin_search_path", "gin_allow_unused")


def define_flags() -> None:
    """Defines every flag of the command line."""
    # absl ends the help of a repeatable flag by "; repeat this option …", so it has no full stop.
    flags.DEFINE_multi_string("gin_file", None, "Config file; a later one overrides an earlier one")
    flags.DEFINE_multi_string(
        "gin_param",
        None,
        'Binding such as "TRAIN_STEPS = 100", read after the files. --gin_bindings and '
        "--gin.NAME=VALUE mean the same",
    )
    flags.DEFINE_alias("gin_bindings", "gin_param")
    flags.DEFINE_multi_string("gin_search_path", None, "Folder to search for configs and includes")
    flags.DEFINE_list(
        "gin_allow_unused", [], "Names of bindings that may go unused, such as Adam.*."
    )
    flags.DEFINE_string("model_dir", None, "Directory the run writes to and resumes from.")
    flags.DEFINE_enum(
        "mode",
        "train_and_eval",
        MODES,
        "Whether to train, evaluate, do both, export, or predict.",
    )
    flags.DEFINE_string(
        "checkpoint",
        "latest",
        "Checkpoint for --mode=eval, export or predict: latest, best, or a step.",
    )
    flags.DEFINE_bool(
        "averaged_weights",
        True,
        "Whether --mode=eval, export or predict uses the averages of the weights, if the run keeps "
        "any.",
    )
    flags.DEFINE_float(
        "follow_timeout",
        None,
        "With --mode=eval, evaluate each new checkpoint until the last step of the run, or until "
        "no new one appears for this many seconds.",
        lower_bound=0,
    )
    flags.DEFINE_string(
        "predictions",
        None,
        "File that --mode=predict writes, in the format of its ending: .jsonl, .npz or .parquet.",
    )
    flags.DEFINE_bool(
        "dry_run", False, "Build everything, make one step, print the config and write nothing."
    )
    flags.DEFINE_enum(
        "strategy",
        "auto",
        STRATEGIES,
        "Strategy that distributes training over the devices.",
    )
    flags.DEFINE_enum(
        "cluster",
        "auto",
        CLUSTERS,
        "Source of the cluster and of this process's task in it: TF_CONFIG, the variables of "
        "Slurm's srun, or none for a process alone. auto takes the first one that is set.",
    )
    flags.DEFINE_integer(
        "num_virtual_devices",
        None,
        "Number of devices to split the host CPU into, or the one GPU that --gpus names.",
        lower_bound=1,
    )
    flags.DEFINE_integer(
        "virtual_gpu_memory",
        None,
        "Memory of each virtual GPU in MiB; by default 85% of the GPU's, divided among them.",
        lower_bound=1,
    )
    flags.DEFINE_string("gpus", "all", "GPUs to use: all, none, or their numbers, such as 0,1.")
    flags.DEFINE_bool(
        "memory_growth",
        True,
        "Allocate GPU memory as needed, not all at once. Virtual GPUs always allocate at once.",
    )
    flags.DEFINE_bool("deterministic_ops", False, "Use GPU operations that repeat bit for bit.")
    flags.DEFINE_enum(
        "tf32",
        "off",
        ("on", "off"),
        "Whether GPUs may round float32 inputs of matrix products and convolutions to 10 bits of "
        "mantissa (TF32), which is several times faster from Ampere on.",
    )
    flags.DEFINE_enum(
        "jit_compile",
        "auto",
        JIT_COMPILE,
        "Whether XLA compiles forward and backward pass, and the update. auto: on GPUs, except for "
        "what XLA cannot compile. Changes results only by rounding.",
    )
    flags.DEFINE_bool(
        "shard_optimizer_state",
        False,
        "Keep on each replica the slots of its share of the weights alone.",
    )
    flags.DEFINE_enum(
        "cross_device_ops",
        "auto",
        CROSS_DEVICE_OPS,
        "All-reduce of --strategy=mirrored.",
    )
    flags.DEFINE_integer(
        "num_packs",
        1,
        "Number of gradient buffers for --cross_device_ops=nccl or hierarchical_copy; 0 uses none.",
        lower_bound=0,
    )
    flags.DEFINE_integer(
        "bytes_per_pack",
        BYTES_PER_PACK,
        "Bytes per buffer in which workers send gradients, those of the last layers first; 0 sends "
        "one buffer.",
        lower_bound=0,
    )
    flags.DEFINE_enum(
        "collectives",
        "auto",
        COLLECTIVES,
        "Communication between workers, and between GPUs. auto: nccl between GPUs, else ring.",
    )
    flags.DEFINE_float(
        "communication_timeout",
        None,
        "Seconds after which a collective fails if a worker does not join it. TensorFlow keeps one "
        "thread waiting this long for each collective, so set it only to debug a short run.",
    )
    flags.DEFINE_float("join_timeout", 60.0, "Seconds that workers wait for each other to join.")
    flags.DEFINE_float(
        "peer_timeout",
        30.0,
        "Seconds after which a worker counts as lost if its machine does not answer.",
    )
    flags.DEFINE_float(
        "stall_timeout",
        300.0,
        "Seconds after which a stalled worker counts as lost, such as one stopped by SIGSTOP.",
    )
    flags.DEFINE_integer(
        "steps_per_loop",
        None,
        "Updates per Python call; the default takes about one second. Never changes results.",
        lower_bound=1,
    )
    flags.DEFINE_string(
        "profile",
        None,
        "Steps to profile, such as 100:110: those after step 100 up to step 110.",
    )
    flags.DEFINE_enum(
        "data_on_device",
        "auto",
        ("auto", "true", "false"),
        "Whether to keep arrays on the devices and gather batches there. Never changes results.",
    )


def parse_gpus(text: str) -> list[int] | None:
    """Parses --gpus into GPU indices; None means all GPUs.

    Raises:
      flags.Error: If the text is not all, none or a list of numbers.
    """
    if text == "all":
        return None
    if text in ("none", ""):
        return []
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise flags.Error(
            f"--gpus must be all, none, or numbers such as 0,1, got {text!r}."
        ) from None


def parse_checkpoint(text: str) -> str | int:
    """Parses --checkpoint into `latest`, `best` or a step.

    Raises:
      flags.Error: If the text is none of these.
    """
    if text in ("latest", "best"):
        return text
    if text.isdecimal():
        return int(text)
    raise flags.Error(f"--checkpoint must be latest, best, or a step, got {text!r}.")


def parse_profile(text: str | None) -> tuple[int, int] | None:
    """Parses --profile into the step to begin after and the last step; None means no profile.

    Raises:
      flags.Error: If the text is not two steps, the smaller one first.
    """
    if text is None:
        return None
    first, colon, last = text.partition(":")
    if colon and first.isdecimal() and last.isdecimal() and int(first) < int(last):
        return int(first), int(last)
    raise flags.Error(
        "--profile must be two steps, the smaller one first, such as 100:110 for the updates after "
        f"step 100 up to step 110, got {text!r}."
    )


def parse_on_device(text: str) -> bool | Literal["auto"]:
    """Parses --data_on_device into the value that `ddl.Trainer` expects."""
    return "auto" if text == "auto" else text == "true"


def share(values: flags.FlagValues, names: Iterable[str]) -> None:
    """Adds flags of `ddl.main` to those of another command."""
    for name in names:
        values[name] = FLAGS[name]


def list_of_flags(values: flags.FlagValues) -> str:
    """Returns the part of --help that lists the flags of a command.

    Args:
      values: The flags; those of `ddl.main` are listed without absl's own.
    """
    listed = (
        FLAGS.get_flags_for_module(__name__)
        if values is FLAGS
        else [values[name] for name in values]
    )
    # FlagValues.get_help leaves out the flags that another module defined.
    own = flags.FlagValues()
    for flag in listed:
        own[flag.name] = flag
    return own.get_help()


define_flags()
