"""The result of a search in words. Imports no TensorFlow."""

from collections.abc import Iterator

from ddl.bisect.first_difference import STATE, Difference
from ddl.bisect.search import Result

_SOME = 8


def lines(result: Result) -> Iterator[str]:
    """Yields the lines that tell a result."""
    found = result.difference
    if result.differs is None:
        yield f"The runs are the same up to step {result.equal:,}."
        return
    if found is None:
        steps = (
            f"step {result.differs:,}"
            if result.differs == result.equal + 1
            else f"one of the steps {result.equal + 1:,} to {result.differs:,}"
        )
        yield (
            f"The runs differ first in {steps}. The values that were recorded of these steps are "
            "equal: the difference is one of rounding, in how TensorFlow fuses operations, or the "
            "replay does not repeat a run."
        )
    elif found.step == 0:
        yield f"The runs differ before the first update: stage {found.stage}, {found.name}."
    else:
        yield (
            f"The runs differ first in step {found.step:,}: stage {found.stage}, {found.name}"
            f"{_where(found)}."
        )
        yield from _details(found)
    yield f"Replays of both runs: {result.replays}."
    yield from result.verdicts


def _where(found: Difference) -> str:
    replicas = ", ".join(map(str, found.replicas))
    return f" on replica {replicas} alone" if replicas else ""


def _details(found: Difference) -> Iterator[str]:
    if found.is_missing:
        yield "  Only one of the runs computes this value, in this shape."
    elif found.stage == STATE:
        yield "  Of what a checkpoint holds, nothing else differs after this step."
    else:
        yield (
            f"  {found.expected:.9g} → {found.got:.9g}; largest relative difference "
            f"{found.size:.1e}"
        )
    if found.rows:
        some = [str(row) for row in found.rows[:_SOME]]
        if found.examples is not None:
            some = [
                f"{row} (example {one}{'' if one == other else f' → {other}'})"
                for row, (one, other) in zip(found.rows, found.examples, strict=True)
            ][:_SOME]
        more = f" and {len(found.rows) - _SOME} more" if len(found.rows) > _SOME else ""
        yield f"  rows of the global batch that differ: {', '.join(some)}{more}"
    yield f"  {found.equal} values of this step before it are equal."
