"""Command that continues a text with the language model of a run.

  python -m ddl.generate --gin_file=configs/play_gpt.gin --model_dir=runs/play_gpt --prompt='ROMEO:'

The command restores a checkpoint as --mode=eval does, and draws one token after the other on one
device. It prints the prompt and its continuation; all else goes to standard error. The same
checkpoint, prompt and --seed give the same text. The tokens of a model with a vocabulary of 256 are
bytes; for another one, bind TextCodec.encode and TextCodec.decode, or pass --prompt_tokens. The
command writes no file.

Exit status:
  0    Done.
  1    The flags, the config, the checkpoint or the prompt have an error.
  70   Any other error: a bug, shown with its traceback, or a failure of the system.
  130  The command was interrupted.
"""

import sys
from collections.abc import Sequence

try:
    from absl import flags

    from ddl.cli.commands import exiting_on_errors, parse_command_line
    from ddl.cli.flags import FLAGS as MAIN_FLAGS
    from ddl.cli.flags import OF_CONFIG, parse_checkpoint, parse_gpus, share
    from ddl.cli.placing import build_placement
except KeyboardInterrupt:  # else Python prints a traceback
    sys.exit(130)

FLAGS = flags.FlagValues()

# Flags of ddl.main that define the model, its weights and its device.
_OF_MAIN = (
    *OF_CONFIG,
    *("model_dir", "checkpoint", "averaged_weights"),
    *("gpus", "memory_growth", "deterministic_ops", "tf32"),
)
_PROMPTS = ("prompt", "prompt_file", "prompt_tokens")


def define_flags() -> None:
    """Defines every flag of the command line."""
    share(FLAGS, _OF_MAIN)
    flags.DEFINE_string("prompt", None, "Text to continue.", flag_values=FLAGS)
    flags.DEFINE_string("prompt_file", None, "File with the text to continue.", flag_values=FLAGS)
    flags.DEFINE_list(
        "prompt_tokens",
        None,
        "Numbers of the tokens to continue, such as 5,0,17. The continuation is printed as numbers "
        "too.",
        flag_values=FLAGS,
    )
    flags.DEFINE_integer("length", 200, "Tokens to draw.", lower_bound=1, flag_values=FLAGS)
    flags.DEFINE_float(
        "temperature",
        1.0,
        "Divisor of the logits: below 1 likely tokens become likelier; 0 takes the likeliest one.",
        lower_bound=0.0,
        flag_values=FLAGS,
    )
    flags.DEFINE_integer(
        "top_k", None, "Draw among this many likeliest tokens.", lower_bound=1, flag_values=FLAGS
    )
    flags.DEFINE_float(
        "top_p",
        None,
        "Draw among the fewest tokens that have this probability together.",
        lower_bound=0.0,
        upper_bound=1.0,
        flag_values=FLAGS,
    )
    flags.DEFINE_integer("seed", 0, "Seed of the draws.", flag_values=FLAGS)
    flags.DEFINE_integer(
        "num_samples", 1, "Continuations to draw.", lower_bound=1, flag_values=FLAGS
    )


def check_flags() -> tuple[list[int] | None, str | int, list[int] | None]:
    """Checks the parsed flags; returns the GPUs, the checkpoint and the tokens of the prompt.

    Raises:
      flags.Error: If a flag is missing or wrong.
    """
    if FLAGS.model_dir is None:
        raise flags.Error("--model_dir is required. Pass the directory of a run that trained.")
    given = [name for name in _PROMPTS if FLAGS[name].present]
    if len(given) != 1:
        got = " and ".join(f"--{name}" for name in given) or "none"
        raise flags.Error(
            f"Exactly one of --prompt, --prompt_file and --prompt_tokens is required, got {got}."
        )
    tokens = None
    if FLAGS.prompt_tokens is not None:
        try:
            tokens = [int(token) for token in FLAGS.prompt_tokens]
        except ValueError:
            raise flags.Error(
                "--prompt_tokens must be numbers such as 5,0,17, got "
                f"{','.join(FLAGS.prompt_tokens)!r}."
            ) from None
    return parse_gpus(FLAGS.gpus), parse_checkpoint(FLAGS.checkpoint), tokens


def run(argv: Sequence[str] | None = None) -> None:
    """Runs the command, and exits with a status documented above.

    Args:
      argv: The program's name, then the arguments; None takes those of this process.
    """
    gpus, checkpoint, tokens = parse_command_line("ddl generate", __doc__, FLAGS, argv, check_flags)
    MAIN_FLAGS.mark_as_parsed()
    with exiting_on_errors():
        generate(gpus, checkpoint, tokens)


def generate(
    gpus: Sequence[int] | None, checkpoint: str | int, tokens: Sequence[int] | None
) -> None:
    """Prints the continuations that the parsed flags ask for.

    Args:
      gpus: Indices of the GPUs to use; None means all.
      checkpoint: The checkpoint: `latest`, `best`, or a step.
      tokens: Tokens of the prompt; None takes its text.
    """
    MAIN_FLAGS.cluster = "none"  # one process and one device draw, whatever TF_CONFIG says
    MAIN_FLAGS.strategy = "one_device"
    placement = build_placement(gpus)
    assert placement is not None  # only a parameter server gets None

    from ddl.config.registry import user_packages
    from ddl.run.from_checkpoints import SavedWeights
    from ddl.run.generation.from_run import Draws, generate_from_run, read_prompt, show
    from ddl.training.loop.device_errors import device_errors
    from ddl.user_code import attributing_errors

    with attributing_errors(user_packages()), device_errors():
        prompt = tokens or read_prompt(FLAGS.prompt, FLAGS.prompt_file)
        samples = generate_from_run(
            placement,
            FLAGS.model_dir,
            prompt,
            Draws(FLAGS.length, FLAGS.temperature, FLAGS.top_k, FLAGS.top_p, FLAGS.seed),
            samples=FLAGS.num_samples,
            weights=SavedWeights(checkpoint, FLAGS.averaged_weights),
            allow_unused=FLAGS.gin_allow_unused,
        )
        show(samples)


define_flags()

if __name__ == "__main__":
    run()
