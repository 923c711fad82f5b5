"""Iterators end before Python does: no thread of theirs calls it while it shuts down."""

import numpy as np
import pytest

from ddl.data import BatchPipeline, RandomAccessSource
from ddl.data.pipeline import at_exit
from ddl.devices.path import CPU, GPU, taking
from tests.conftest import make_strategy


@pytest.mark.parametrize("path", ["plain", "distributed"])
def test_all_iterators_end(path):
    source = RandomAccessSource(lambda rows: {"x": np.zeros(len(rows), np.float32)}, 100)
    pipeline, strategy = BatchPipeline(source, 10), make_strategy("mirrored", 2)
    with taking(GPU if path == "distributed" else CPU):
        iterator = pipeline.iterator(strategy)
    next(iterator)
    at_exit._end_all()
    with pytest.raises(Exception, match="NoneType|None|list index"):
        next(iterator)
    if path == "distributed":
        (made,) = (each._iterator for each in iterator._iterators)
        assert made._multi_device_iterator_resource is None
    else:
        assert iterator._iterator_resource is None
