"""The benchmark of max pooling builds what it measures."""

import pytest

from benchmarks import max_pooling


@pytest.mark.parametrize("in_own_graph", [False, True])
def test_the_graph_is_as_asked(in_own_graph):
    max_pooling.build(max_pooling.mlp, 25, 2, in_own_graph)()
