"""A check that all workers read the same data.

The order of the examples follows from their number. A worker that misses a file would read other
examples than its peers expect, so that some are repeated and others dropped.
"""

import json
import os
import zlib
from collections.abc import Iterator, Mapping

import numpy as np
import tensorflow as tf
from absl import logging

from ddl.data.pipeline import BatchPipeline
from ddl.data.source import Source
from ddl.data.stream import Stream
from ddl.distribution.workers import Workers
from ddl.errors import DataError

_MOST_SIZES = 1000
"""Number of files up to which their sizes are compared: a network drive takes time for each."""

_MOST_NAMED = 10_000
"""Number of files up to which a message names those that differ."""

_TOO_MANY = "too many"

_FLOATS = "floats"

_MOST_ROWS = 1000
_MOST_BYTES = 1 << 24


def check_same_data(
    strategy: tf.distribute.Strategy,
    train: Mapping[str, BatchPipeline],
    evaluation: BatchPipeline | None,
) -> None:
    """Compares the data of all workers: lengths, features, files, and rows of arrays in memory.

    It compares names of files within their folder, their sizes, and up to 1,000 rows of arrays.
    Rows of floats that differ are only warned of: machines may round a preprocessing differently.
    Eager, cross-replica context, on all workers.

    Args:
      strategy: The strategy.
      train: Pipeline of each source of training data, by its name.
      evaluation: Pipeline of the evaluation data, if any.

    Raises:
      DataError: On all workers, if a worker differs from worker 0; says in what.
    """
    workers = Workers(strategy)
    if workers.number == 1:
        return
    for source in {
        id(one.source): one.source for one in [*train.values(), evaluation] if one
    }.values():
        if isinstance(source, Stream) and not source.is_repeatable:
            raise DataError(
                f"Two reads of the first examples of {source.name} differ, so that workers, each "
                "of which keeps its rows, would train on some twice and on others never. Seed what "
                "is random: ddl.data.stream(lambda epoch: ….shuffle(n, seed=epoch))."
            )
    pipelines = {
        f"training data {name!r}" if name else "training data": p for name, p in train.items()
    }
    if evaluation is not None:
        pipelines["evaluation data"] = evaluation
    facts = {
        f"{fact} of the {data}": value
        for data, pipeline in pipelines.items()
        for fact, value in _facts(pipeline).items()
    }
    text = json.dumps(facts)
    # A number of a worker has the shape of other sums, so that no function is traced for it.
    digests = workers.gather(np.array([float(zlib.crc32(text.encode()))]))
    if (digests == digests[0]).all():
        return
    all_facts = [json.loads(text) for text in workers.gather_texts(text)]
    expected = all_facts[0]
    for index, given in enumerate(all_facts[1:], start=1):
        differing = [
            name for name in {**expected, **given} if expected.get(name) != given.get(name)
        ]
        if differing and all(name.startswith(_FLOATS) for name in differing):
            logging.warning(
                "The floats of the %s differ between worker 0 and worker %s. If this is more than "
                "rounding, each worker trains on rows that another one does not expect. Give all "
                "workers the same data.",
                " and ".join(name.removeprefix(f"{_FLOATS} of the ") for name in differing),
                index,
            )
        elif differing:
            lines = [
                f"  {name}: {expected.get(name, 'none')} on worker 0, {given.get(name, 'none')} on "
                f"worker {index}"
                for name in differing
            ]
            if any(name.startswith("files ") for name in differing):
                lines += _files_that_differ(workers, list(pipelines.values()), index)
            workers.barrier()
            listing = "\n".join(lines)
            raise DataError(
                f"Worker {index} must read the data of worker 0, but they differ in\n{listing}\n"
                "Give all workers the same files, and start all of them again."
            )


def _facts(pipeline: BatchPipeline) -> dict[str, str]:
    """Returns what must be the same on all workers, as texts by name."""
    spec = pipeline.source.element_spec
    found = {
        "examples": str(pipeline.num_examples),
        "steps per epoch": str(pipeline.steps_per_epoch),
        "features": ", ".join(f"{k} {spec[k].dtype.name} {spec[k].shape}" for k in sorted(spec)),
    }
    if files := _files(pipeline.source):
        digest = zlib.crc32("\n".join(files).encode())
        found["files"] = f"{len(files):,} (digest of names and sizes {digest:08x})"
    arrays = getattr(pipeline.source, "arrays", None)
    if arrays is not None:
        for name, floats in (("arrays", False), (_FLOATS, True)):
            found[name] = f"digest of rows {_digest(arrays, floats)}"
    return found


def _files(source: Source | Stream) -> list[str]:
    """Returns the names of the files of a source, whose folders may differ, and their sizes."""
    paths, shown = source.files, [os.path.basename(path) for path in source.files]
    if len(paths) > _MOST_SIZES:
        return shown
    return [f"{name} ({_size(path)})" for name, path in zip(shown, paths, strict=True)]


def _size(path: str) -> str:
    try:
        return f"{tf.io.gfile.stat(path).length:,} bytes"
    except (OSError, tf.errors.OpError):
        return "not found"


def _digest(features: Mapping[str, np.ndarray], floats: bool) -> str:
    """Returns a digest of rows of the arrays of floats, or of all others."""
    digest = 0
    for name, array in sorted(features.items()):
        if (array.dtype.kind not in "biuOSU") != floats:  # bfloat16 has a kind of its own
            continue
        rows = min(_MOST_ROWS, len(array), max(1, _MOST_BYTES * len(array) // max(1, array.nbytes)))
        chosen = array[np.linspace(0, len(array) - 1, rows).astype(np.int64)]
        content = repr(chosen.tolist()).encode() if array.dtype == object else chosen.tobytes()
        digest = zlib.crc32(
            content, zlib.crc32(f"{name} {array.dtype} {array.shape}".encode(), digest)
        )
    return f"{digest:08x}"


def _files_that_differ(
    workers: Workers, pipelines: list[BatchPipeline], index: int
) -> Iterator[str]:
    """Returns lines on the first files that differ between worker 0 and another one."""
    files = [*dict.fromkeys(file for one in pipelines for file in _files(one.source))]
    texts = workers.gather_texts("\n".join(files) if len(files) <= _MOST_NAMED else _TOO_MANY)
    if _TOO_MANY in (texts[0], texts[index]):
        return
    here, there = texts[0].splitlines(), texts[index].splitlines()
    for worker, own, others in ((0, here, there), (index, there, here)):
        known = {*others}
        if alone := [file for file in own if file not in known]:
            more = f" and {len(alone) - 5:,} more" if len(alone) > 5 else ""
            yield f"  only on worker {worker}: {', '.join(alone[:5])}{more}"
