"""The flags that name a metric of runs, shared by `ddl sweep` and `ddl compare`."""

from absl import flags


def define_metric_flags(values: flags.FlagValues, metric: str) -> None:
    """Defines --metric, --split and --best.

    Args:
      values: The flags of the command.
      metric: Begin of the help of --metric.
    """
    flags.DEFINE_string("metric", "loss", f"{metric}; its last value counts.", flag_values=values)
    flags.DEFINE_enum(
        "split", "eval", ("eval", "train"), "Split of the metric.", flag_values=values
    )
    flags.DEFINE_enum(
        "best",
        None,
        ("max", "min"),
        "Whether the largest or the smallest value is best. Required unless the metric is loss or "
        "an accuracy.",
        flag_values=values,
    )
