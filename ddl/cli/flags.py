"""The flags of `ddl.main`, `ddl.launch` and `ddl.check`, and their checks. No TensorFlow."""

from functools import partial
from typing import Any

from absl import flags

from ddl.choices import CLUSTERS, JIT_COMPILE, MODES, PREDICTIONS, STRATEGIES
from ddl.errors import either


def config_flags() -> flags.FlagValues:
    """Returns the flags that load a config, without values."""
    values = flags.FlagValues()
    texts = partial(flags.DEFINE_multi_string, flag_values=values)
    # absl ends the help of a repeatable flag by "; repeat this option …", so it has no full stop.
    texts("gin_file", None, "Config file; a later one overrides an earlier one")
    texts("gin_param", None, "Binding NAME=VALUE, read after the files; also --gin.NAME=VALUE")
    flags.DEFINE_alias("gin_bindings", "gin_param", flag_values=values)
    texts("gin_search_path", None, "Folder to search for configs and includes")
    unused = "Names of bindings that may go unused, such as Adam.*."
    flags.DEFINE_list("gin_allow_unused", [], unused, flag_values=values)
    return values


class _DryRunParser(flags.BooleanParser):
    """Parses a switch that takes `config` too."""

    def parse(self, argument: Any) -> Any:
        return argument if argument == "config" else super().parse(argument)


def main_flags() -> flags.FlagValues:
    """Returns the flags of `ddl.main`, without values."""
    values = config_flags()
    text = partial(flags.DEFINE_string, flag_values=values)
    choice = partial(flags.DEFINE_enum, flag_values=values)
    count = partial(flags.DEFINE_integer, lower_bound=1, flag_values=values)
    seconds = partial(flags.DEFINE_float, lower_bound=0, flag_values=values)
    switch = partial(flags.DEFINE_bool, flag_values=values)

    # What to do.
    text("model_dir", None, "Directory the run writes to and resumes from.")
    choice("mode", "train_and_eval", MODES, "Train, evaluate, do both, export, or predict.")
    text("checkpoint", "latest", "For --mode=eval, export or predict: latest, best, or a step.")
    text("predictions", None, f"File of --mode=predict; ends with {either(PREDICTIONS)}.")
    follows = "With --mode=eval, evaluate each new checkpoint until none comes for so many seconds."
    seconds("follow_timeout", None, follows)
    tries = "Build everything, make one step, write nothing; --dry_run=config prints all values."
    flags.DEFINE(_DryRunParser(), "dry_run", False, tries, values, boolean=True)
    text("profile", None, "Steps to profile; 100:110 are those after step 100 up to step 110.")

    # Where to do it.
    choice("strategy", "auto", STRATEGIES, "Strategy that distributes training over the devices.")
    source = "Source of the cluster: TF_CONFIG, Slurm's variables or none; auto: the first one set."
    choice("cluster", "auto", CLUSTERS, source)
    count("num_virtual_devices", None, "Devices to split the host CPU, or the one GPU, into.")
    text("gpus", "all", "GPUs to use: all, none, or their numbers, such as 0,1.")
    switch("deterministic_ops", False, "Use GPU operations that repeat bit for bit.")
    rounds = "Round float32 inputs of products and convolutions on GPUs to TF32, which is fast."
    choice("tf32", "off", ("on", "off"), rounds)
    compiles = "Compile updates by XLA; auto: on GPUs, except for what XLA cannot compile."
    choice("jit_compile", "auto", JIT_COMPILE, compiles)
    switch("shard_optimizer_state", False, "Keep on each replica the slots of its share alone.")
    count("steps_per_loop", None, "Updates per Python call; by default about one second of them.")
    lost = (
        "Seconds after which a worker counts as lost that does not join (by default 60) or stalls "
        "(300); one whose machine does not answer is lost after 30 at most."
    )
    flags.DEFINE_float("worker_timeout", None, lost, lower_bound=1, flag_values=values)
    return values


def launch_flags() -> flags.FlagValues:
    """Returns the flags of `ddl.launch` before --, without values."""
    values = flags.FlagValues()
    count = partial(flags.DEFINE_integer, flag_values=values)
    count("num_workers", None, "Number of workers.", lower_bound=1)
    count("num_ps", 0, "Number of parameter servers; with any there is a chief.", lower_bound=0)
    count("max_restarts", 0, "Maximum restarts without a newer checkpoint.", lower_bound=0)
    flags.DEFINE_bool("pin_gpus", False, "Give each worker a GPU of its own.", flag_values=values)
    return values


def check_flags(values: flags.FlagValues) -> None:
    """Checks the parsed flags of `ddl.main`, also against each other.

    Raises:
      flags.Error: If a flag is missing, wrong, or without effect.
    """
    if values.model_dir is None and not values.dry_run:
        raise flags.Error(
            "--model_dir is required. Pass a directory for the run, such as "
            "--model_dir=runs/digits, or --dry_run to write nothing."
        )
    gpus_of(values), checkpoint_of(values), profile_of(values)
    follows, reads_saved = values.follow_timeout is not None, "train" not in values.mode
    has_effect = {
        "checkpoint": reads_saved and not follows,
        "follow_timeout": values.mode == "eval",
        "profile": not reads_saved and not values.dry_run,
        "predictions": values.mode == "predict",
    }
    for name, is_read in has_effect.items():
        if values[name].present and not is_read:
            others = " --follow_timeout" * follows + " --dry_run" * bool(values.dry_run)
            raise flags.Error(
                f"--{name} has no effect with --mode={values.mode}{others}. Leave it out."
            )
    if values.mode == "predict" and not (values.predictions or "").endswith(PREDICTIONS):
        raise flags.Error(
            f"--mode=predict needs --predictions with a file that ends with {either(PREDICTIONS)}, "
            f"got {values.predictions}."
        )


def gpus_of(values: flags.FlagValues) -> list[int] | None:
    """Returns the indices of --gpus; None means all GPUs.

    Raises:
      flags.Error: If the text is not all, none or a list of numbers.
    """
    if values.gpus == "all":
        return None
    parts = [] if values.gpus == "none" else values.gpus.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise flags.Error(f"--gpus must be all, none, or numbers such as 0,1, got {values.gpus!r}.")
    return [int(part) for part in parts]


def checkpoint_of(values: flags.FlagValues) -> str | int:
    """Returns --checkpoint: `latest`, `best` or a step.

    Raises:
      flags.Error: If the text is none of these.
    """
    text = values.checkpoint
    if text not in ("latest", "best") and not text.isdecimal():
        raise flags.Error(f"--checkpoint must be latest, best, or a step, got {text!r}.")
    return int(text) if text.isdecimal() else text


def profile_of(values: flags.FlagValues) -> tuple[int, int] | None:
    """Returns the step after which --profile begins and its last step; None means no profile.

    Raises:
      flags.Error: If the text is not two steps, the smaller one first.
    """
    if values.profile is None:
        return None
    first, _, last = values.profile.partition(":")
    if not (first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        raise flags.Error(
            "--profile must be two steps, the smaller one first, such as 100:110 for the updates "
            f"after step 100 up to step 110, got {values.profile!r}."
        )
    return int(first), int(last)
