"""The step at which runs parted, from the digests in metrics.jsonl and beside checkpoints."""

from collections.abc import Mapping, Sequence

from ddl.report.record import Record

_LOGS, _SAVES = "metrics.jsonl", "checkpoints"


def partings(records: Sequence[Record], names: Sequence[str]) -> list[str]:
    """Returns a line for each run but the first, which says where it parted from the first.

    Args:
      records: The runs.
      names: Their names.

    Returns:
      The lines; none if fewer than two runs have a digest.
    """
    if sum(bool(one.logged_digests or one.saved_digests) for one in records) < 2:
        return []
    first, *others = zip(records, names, strict=True)
    return [_parting(first, other) for other in others]


def _parting(a: tuple[Record, str], b: tuple[Record, str]) -> str:
    (run, name), (other, other_name) = a, b
    whole = f"{other_name} and {name}"
    # A callback may change weights between a log and a save of one step: each with its own kind.
    compared = {
        _LOGS: _compared(run.logged_digests, other.logged_digests),
        _SAVES: _compared(run.saved_digests, other.saved_digests),
    }
    steps = sorted((step, equal) for kind in compared.values() for step, equal in kind.items())
    if not steps:
        return (
            f"{whole}: cannot tell whether they parted, since no step has a digest of both, in "
            f"{_LOGS} or beside a checkpoint. Train with RunPlan.log_digest = True and one "
            "LOG_EVERY."
        )
    differing = [step for step, equal in steps if not equal]
    if not differing:
        return (
            f"{whole} have the same bits at each step compared: {len(dict(steps)):,}, the last is "
            f"{steps[-1][0]:,}."
        )
    found = differing[0]
    before = [step for step, equal in steps if equal and step < found]
    after = [step for step, equal in steps if equal and step > found]
    since = f"after step {before[-1]:,}, the last one with the same bits" if before else ""
    where = f"{since}, and at or before step {found:,}" if since else f"at or before step {found:,}"
    line = f"{whole} parted {where}."
    if after:
        line += f" Yet they have the same bits at step {after[0]:,}: one was changed or repeated."
    return f"{line} ddl bisect finds the update."


def _compared(a: Mapping[int, str], b: Mapping[int, str]) -> dict[int, bool]:
    """Returns whether the digests are equal, at each step that has both."""
    return {step: a[step] == b[step] for step in a.keys() & b.keys()}
