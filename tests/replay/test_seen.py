"""When a run read an example."""

from pathlib import Path

import numpy as np
import pytest

from ddl import config
from ddl.data.arrays import ArraySource
from ddl.data.pipeline import BatchPipeline
from ddl.errors import ConfigError
from ddl.replay import seen as seen_module
from ddl.replay.folder import Run
from ddl.replay.seen import seen


def pipeline(size):
    source = ArraySource({"x": np.arange(40, dtype="f4")})
    return BatchPipeline(source, size, seed=3, shuffle=True, resident=False)


def shown(run, size, monkeypatch):
    monkeypatch.setattr(seen_module, "pipelines_of_config", lambda part: {"": pipeline(size)})
    return list(seen(run, 17))


def test_the_batch_is_that_of_the_run(tmp_path, monkeypatch):
    """On two replicas of 4 examples; this process has one."""
    config.set_macro("PER_REPLICA_BATCH_SIZE", None)
    saved = {"global_batch_size": 8, "batches_per_update": 1, "replicas": 2}
    run = Run(tmp_path, {}, {10: saved}, 10)
    assert shown(run, 4, monkeypatch) == shown(run, 8, monkeypatch)
    assert shown(Run(tmp_path, {}, {10: {}}, 10), 4, monkeypatch) != shown(run, 4, monkeypatch)


def test_an_unknown_number_of_replicas_is_refused(tmp_path, monkeypatch):
    config.set_macro("PER_REPLICA_BATCH_SIZE", 4)
    with pytest.raises(ConfigError, match="no checkpoint of .* says how many replicas"):
        shown(Run(Path(tmp_path), {}, {}, 10), 4, monkeypatch)
