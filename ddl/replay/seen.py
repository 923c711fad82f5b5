"""When a run read an example, and will read it."""

from collections.abc import Iterator, Mapping
from typing import Any

from ddl import config
from ddl.data.seen import place_of
from ddl.errors import ConfigError
from ddl.replay.batches import is_numbered
from ddl.replay.folder import Run
from ddl.report import record
from ddl.run.data.of_config import pipelines_of_config

_MOST = 20


def seen(run: Run, example: int) -> Iterator[str]:
    """Yields a line for each epoch of a run so far, in which it read an example of its data.

    Runs eagerly; the config of the run must be loaded.

    Args:
      run: The run.
      example: Index of the example in the training data, from 0.

    Raises:
      ConfigError: If there is no such example, the data are read in an order of their own, or the
        global batch size is not known.
    """
    found = record.read(run.path)
    for figure, what in (("skipped_updates", "skipped"), ("rewinds", "rewound")):
        if (number := found.last(figure)) > 0:
            yield (
                f"The run {what} {number:,.0f} times: the step of a batch is smaller than shown "
                "by the batches that made no update."
            )
    pipelines = pipelines_of_config("train")
    for name, pipeline in pipelines.items():
        of = f" of the source {name}" if name else ""
        source = pipeline.source
        if not is_numbered(source):
            if len(pipelines) > 1:
                yield f"The examples{of} have no indices."
                continue
            raise ConfigError(
                f"{type(source).__name__} reads its examples in an order of its own, so that they "
                "have no indices to look for. Only sources with random access have."
            )
        saved = run.metadata_at(run.reached)
        each = _of_source(saved.get("batches_per_update"), name) or 1
        size = _of_source(saved.get("global_batch_size"), name) or pipeline.global_batch_size
        if not saved and config.get_macro("PER_REPLICA_BATCH_SIZE") is not None:
            raise ConfigError(
                "The global batch size is needed, but the config gives that of a replica "
                f"(PER_REPLICA_BATCH_SIZE), and no checkpoint of {run.path} says how many replicas "
                "there were. Pass --gin_param='PER_REPLICA_BATCH_SIZE = None' and "
                "--gin_param='GLOBAL_BATCH_SIZE = N', with the product for N."
            )
        of_epoch = -(-pipeline.num_examples // size)
        epochs = max(1, -(-run.reached * each // of_epoch))
        yield f"example {example:,}{of}, {pipeline.num_examples:,} examples per epoch"
        shown = range(epochs) if epochs <= _MOST else range(epochs - _MOST, epochs)
        if len(shown) < epochs:
            yield f"(the last {_MOST} of {epochs:,} epochs)"
        for epoch in shown:
            batch, row = place_of(
                example,
                epoch,
                num_examples=pipeline.num_examples,
                global_batch_size=size,
                seed=pipeline.order_seed,
                shuffle=pipeline.shuffle,
            )
            step = batch // each + 1
            reached = "" if step <= run.reached else ", which the run has not reached"
            yield f"  epoch {epoch:>5,}: step {step:,}, row {row}, batch {batch:,}{reached}"


def _of_source(number: Any, name: str) -> int | None:
    """Returns what a checkpoint says of a source; None if it does not say it."""
    if isinstance(number, Mapping):
        number = number.get(name)
    return number if isinstance(number, int) else None
