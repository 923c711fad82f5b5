"""Checks of the flags of `ddl.main` against each other. Imports no TensorFlow."""

from absl import flags

from ddl.choices import PREDICTIONS
from ddl.cli.flags import FLAGS
from ddl.errors import either


def check_flags_fit_mode() -> None:
    """Checks that --mode reads every flag given.

    Raises:
      flags.Error: If the mode ignores a given flag.
    """
    reads_saved = FLAGS.mode in ("eval", "export", "predict")
    trains = FLAGS.mode in ("train", "train_and_eval")
    for name, is_read in (
        ("checkpoint", reads_saved and FLAGS.follow_timeout is None),
        ("averaged_weights", reads_saved),
        ("follow_timeout", FLAGS.mode == "eval"),
        ("profile", trains),
        ("predictions", FLAGS.mode == "predict"),
    ):
        if FLAGS[name].present and not is_read:
            is_follower = name == "checkpoint" and reads_saved  # the mode alone would read it
            following = " and --follow_timeout" if is_follower else ""
            raise flags.Error(
                f"--{name} has no effect with --mode={FLAGS.mode}{following}. Leave it out."
            )
    if FLAGS.mode == "predict":
        if not FLAGS.predictions:
            raise flags.Error(
                "--mode=predict needs --predictions. Pass a file that ends with "
                f"{either(PREDICTIONS)}, such as --predictions=predictions.jsonl."
            )
        if not FLAGS.predictions.endswith(PREDICTIONS):
            raise flags.Error(
                f"--predictions must end with {either(PREDICTIONS)}, got {FLAGS.predictions}."
            )
