"""The flags of `ddl.main`, shared with other commands. Imports no TensorFlow."""

from typing import Literal

from absl import flags

from ddl.choices import BYTES_PER_PACK, CLUSTERS, COLLECTIVES, CROSS_DEVICE_OPS, MODES, STRATEGIES

FLAGS = flags.FLAGS


def define_flags() -> None:
    """Defines every flag of the command line."""
    flags.DEFINE_multi_string("gin_file", None, "A config. May be given several times, in order.")
    flags.DEFINE_multi_string(
        "gin_param",
        None,
        'A binding such as "TRAIN_STEPS = 100", read after the files. May be given several '
        "times; --gin_bindings and --gin.NAME=VALUE mean the same.",
    )
    flags.DEFINE_alias("gin_bindings", "gin_param")
    flags.DEFINE_multi_string(
        "gin_search_path", None, "A folder to look for configs and includes in."
    )
    flags.DEFINE_list("gin_allow_unused", [], "Names of bindings that may go unused.")
    flags.DEFINE_string("model_dir", None, "Where the run writes, and where it is gone on with.")
    flags.DEFINE_enum("mode", "train_and_eval", MODES, "What to do.")
    flags.DEFINE_string(
        "checkpoint", "latest", "What --mode=eval or export reads: latest, best, or a step."
    )
    flags.DEFINE_bool(
        "averaged_weights",
        True,
        "--mode=eval or export takes the average of the weights, where the run keeps one.",
    )
    flags.DEFINE_float(
        "follow_timeout",
        None,
        "--mode=eval evaluates each new checkpoint as it comes, to the last step of the run or "
        "until none has come for so many seconds.",
        lower_bound=0,
    )
    flags.DEFINE_bool(
        "dry_run", False, "Build everything, make one step, print config and plan, write nothing."
    )
    flags.DEFINE_enum(
        "strategy",
        "auto",
        STRATEGIES,
        "How devices work together.",
    )
    flags.DEFINE_enum(
        "cluster",
        "auto",
        CLUSTERS,
        "What says which worker this is: TF_CONFIG; the variables of Slurm's srun; none, where it "
        "runs alone. auto: the first of these that is there.",
    )
    flags.DEFINE_integer(
        "num_virtual_devices", None, "Split the host CPU into this many devices.", lower_bound=1
    )
    flags.DEFINE_string(
        "gpus", "all", "Which GPUs to use: all, none, or their numbers, such as 0,1."
    )
    flags.DEFINE_bool("memory_growth", True, "Take GPU memory as needed, not all at once.")
    flags.DEFINE_bool("deterministic_ops", False, "Make every GPU operation repeat bit for bit.")
    flags.DEFINE_enum(
        "cross_device_ops",
        "auto",
        CROSS_DEVICE_OPS,
        "The all-reduce of --strategy=mirrored.",
    )
    flags.DEFINE_integer(
        "num_packs",
        1,
        "Buffers of gradients for --cross_device_ops=nccl or hierarchical_copy; 0: none.",
        lower_bound=0,
    )
    flags.DEFINE_integer(
        "bytes_per_pack",
        BYTES_PER_PACK,
        "Size of the buffers in which workers send gradients, the last layers' first; 0: one.",
        lower_bound=0,
    )
    flags.DEFINE_enum(
        "collectives",
        "auto",
        COLLECTIVES,
        "How several workers, and several GPUs, communicate; auto: nccl between GPUs, else ring.",
    )
    flags.DEFINE_float(
        "communication_timeout",
        None,
        "Seconds after which a collective that a worker does not join is an error. TensorFlow has "
        "a thread wait for each collective as long: leave it out but for a short look.",
    )
    flags.DEFINE_float("join_timeout", 60.0, "Seconds that workers wait for each other to join.")
    flags.DEFINE_float(
        "peer_timeout", 30.0, "Seconds after which a worker whose machine is silent is lost."
    )
    flags.DEFINE_float(
        "stall_timeout", 300.0, "Seconds after which one that stalls, such as on SIGSTOP, is lost."
    )
    flags.DEFINE_integer(
        "steps_per_loop",
        None,
        "Updates a Python call; by default about a second's worth. Never changes results.",
        lower_bound=1,
    )
    flags.DEFINE_enum(
        "data_on_device",
        "auto",
        ("auto", "true", "false"),
        "Keep arrays on the devices and gather batches there. Never changes results.",
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
            f"--gpus={text} is neither all, none, nor a list of numbers such as 0,1"
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
    raise flags.Error(f"--checkpoint={text} is neither latest, best, nor a step")


def check_flags_fit_mode() -> None:
    """Checks that --mode reads every flag given.

    Raises:
      flags.Error: If the mode ignores a given flag.
    """
    reads_saved = FLAGS.mode in ("eval", "export")
    for name, is_read in (
        ("checkpoint", reads_saved and FLAGS.follow_timeout is None),
        ("averaged_weights", reads_saved),
        ("follow_timeout", FLAGS.mode == "eval"),
    ):
        if FLAGS[name].present and not is_read:
            following = " and --follow_timeout" if FLAGS.mode == "eval" else ""
            raise flags.Error(f"--{name} has no use with --mode={FLAGS.mode}{following}")


def parse_on_device(text: str) -> bool | Literal["auto"]:
    """Parses --data_on_device into the value that `ddl.Trainer` expects."""
    return "auto" if text == "auto" else text == "true"


def list_of_flags() -> str:
    """Returns the part of --help that lists the flags."""
    own = flags.FlagValues()
    for flag in FLAGS.get_flags_for_module(__name__):
        own[flag.name] = flag
    return own.get_help()


define_flags()
