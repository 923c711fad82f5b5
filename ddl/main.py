"""Trains, evaluates or exports the experiment that gin files describe.

  python -m ddl.main --gin_file=configs/digits_cnn.gin --model_dir=runs/digits

gin files say what is computed, the other flags where it runs. The same command again goes on
where the run stopped. Exit status: 0 done; 1 an error in flags, config or data; 75 stopped by a
signal after saving; 76 training diverged; 77 another worker of the cluster was lost; 70 anything
else: a bug, with its traceback, or the system's doing; 130 interrupted before training, or in an
evaluation or an export.
"""

import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Literal

from absl import flags

from ddl.choices import BYTES_PER_PACK, CLUSTERS, COLLECTIVES, CROSS_DEVICE_OPS, MODES, STRATEGIES
from ddl.command_line import asks_for_help, parse, with_aliases
from ddl.errors import UNEXPECTED_STATUS, DdlError, WorkerLost

if TYPE_CHECKING:
    from ddl.train import Placement

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


def run(argv: Sequence[str] | None = None) -> None:
    """The command `ddl`: parses flags, runs, and exits with the status documented above."""
    arguments = with_aliases(sys.argv if argv is None else argv)
    if asks_for_help(arguments):
        print(usage())
        sys.exit(0)
    try:
        parse(FLAGS, arguments)
        if not FLAGS.gin_file:
            raise flags.Error(
                "--gin_file is missing: name a config, such as configs/digits_cnn.gin"
            )
        if FLAGS.model_dir is None and not FLAGS.dry_run:
            raise flags.Error("--model_dir is missing: name a directory for what the run writes")
        gpus = parse_gpus(FLAGS.gpus)
        checkpoint = parse_checkpoint(FLAGS.checkpoint)
        check_flags_fit_mode()
    except flags.Error as error:
        print(f"ddl: {error}\nddl --help lists all flags.", file=sys.stderr)
        sys.exit(1)
    try:
        start(gpus, checkpoint)
    except DdlError as error:
        print(f"ddl: {error}", file=sys.stderr, flush=True)
        if isinstance(error, WorkerLost):  # TensorFlow's own end would wait for the lost one
            sys.stdout.flush()
            os._exit(error.exit_status)
        sys.exit(error.exit_status)
    except KeyboardInterrupt:  # before training begins, or in an evaluation or an export
        print("ddl: interrupted", file=sys.stderr)
        sys.exit(130)
    except Exception:  # all was written that could be; TensorFlow's own end may wait for others
        traceback.print_exc()
        with suppress(OSError):  # nobody may read it any more
            sys.stdout.flush()
        os._exit(UNEXPECTED_STATUS)


def start(gpus: Sequence[int] | None, checkpoint: str | int) -> None:
    """From parsed flags to the end of the run."""
    placement = place(gpus)
    if placement is None:
        return

    from ddl import parameter_servers, saved_weights, train, workers

    several = workers.Workers(placement.strategy).number > 1
    several |= parameter_servers.has_parameter_servers(placement.strategy)
    with workers.leaving(), workers.worker_errors() if several else nullcontext():
        train.run(
            placement,
            FLAGS.model_dir,
            mode=FLAGS.mode,
            dry_run=FLAGS.dry_run,
            allow_unused=FLAGS.gin_allow_unused,
            saved_weights=saved_weights.SavedWeights(checkpoint, FLAGS.averaged_weights),
            follow_timeout=FLAGS.follow_timeout,
        )


def place(gpus: Sequence[int] | None) -> "Placement | None":
    """Loads the config, and takes the devices that the flags name.

    Returns:
      Where to train; None if this process was a parameter server until the end of training.
    """
    # TensorFlow takes seconds to import: only now that the flags are known to be right.
    from ddl.host_memory import keep_freed_memory
    from ddl.quiet import quiet_start_up

    keep_freed_memory()

    # A config imports the user's own modules; the command `ddl` finds them where
    # `python -m ddl.main` does.
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())

    with quiet_start_up():
        from ddl import config

        # First of all: a file that is missing is told before TensorFlow is imported.
        config.load(FLAGS.gin_file, FLAGS.gin_param or (), FLAGS.gin_search_path or ())

        from ddl import cluster_environment, distribution, parameter_servers, train
        from ddl.cluster_timeouts import ClusterTimeouts

        cluster_environment.join_cluster(FLAGS.cluster)
        distribution.configure_devices(
            num_virtual_devices=FLAGS.num_virtual_devices,
            gpus=gpus,
            memory_growth=FLAGS.memory_growth,
            deterministic_ops=FLAGS.deterministic_ops,
        )
        communication = distribution.Communication(
            cross_device_ops=FLAGS.cross_device_ops,
            num_packs=FLAGS.num_packs,
            bytes_per_pack=FLAGS.bytes_per_pack,
            collectives=FLAGS.collectives,
            timeout_seconds=FLAGS.communication_timeout,
        )
        timeouts = ClusterTimeouts(
            join=FLAGS.join_timeout, peer=FLAGS.peer_timeout, stall=FLAGS.stall_timeout
        )
        name = distribution.choose_strategy(FLAGS.strategy)
    if name == "parameter_server" and parameter_servers.serves_here():
        parameter_servers.serve(timeouts)
        return None
    # A process that joins others may be ended meanwhile: nothing of it is kept back.
    joins = name in ("multi_worker_mirrored", "parameter_server")
    with nullcontext() if joins else quiet_start_up():
        strategy = distribution.build_strategy(name, communication, timeouts)
    return train.Placement(
        strategy, communication, FLAGS.steps_per_loop, parse_on_device(FLAGS.data_on_device)
    )


def parse_gpus(text: str) -> list[int] | None:
    """The value of --gpus as indices; None for all."""
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
    """The value of --checkpoint as a name or a step."""
    if text in ("latest", "best"):
        return text
    if text.isdecimal():
        return int(text)
    raise flags.Error(f"--checkpoint={text} is neither latest, best, nor a step")


def check_flags_fit_mode() -> None:
    """Raises flags.Error if a flag was given that the mode does not read."""
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
    """The value of --data_on_device as the trainer takes it."""
    return "auto" if text == "auto" else text == "true"


def usage() -> str:
    """The text of --help."""
    own = flags.FlagValues()
    for flag in FLAGS.get_flags_for_module(__name__):
        own[flag.name] = flag
    return f"{__doc__}\nFlags:\n{own.get_help()}"


define_flags()

if __name__ == "__main__":
    run()
