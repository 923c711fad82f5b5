import pytest

from benchmarks.cluster_model import (
    Cluster,
    Link,
    Work,
    all_reduce,
    efficiency,
    fit_link,
    halving_doubling,
    ring,
    step_time,
)

LINK = Link(latency=1e-5, bandwidth=1e9)
CLUSTER = Cluster(inside=LINK, between=Link(1e-4, 1e8), devices=4)
WORK = Work(compute=0.1, gradient_bytes=1e8)


def ring_by_rounds(size, n, link):
    """Every round sends one part from each device to the next; rounds follow each other."""
    clock = 0.0
    for _ in range(n - 1):  # adds up
        clock += link.latency + size / n / link.bandwidth
    for _ in range(n - 1):  # shares
        clock += link.latency + size / n / link.bandwidth
    return clock


def halving_doubling_by_rounds(size, n, link):
    clock, part, group = 0.0, size, n
    while group > 1:
        part /= 2
        group //= 2
        clock += 2 * (link.latency + part / link.bandwidth)
    return clock


@pytest.mark.parametrize("n", [1, 2, 8, 256])
def test_formulas_are_the_sum_of_their_rounds(n):
    assert ring(4e6, n, LINK) == pytest.approx(ring_by_rounds(4e6, n, LINK))
    assert halving_doubling(4e6, n, LINK) == pytest.approx(halving_doubling_by_rounds(4e6, n, LINK))


@pytest.mark.parametrize("algorithm", ["ring", "halving_doubling", "hierarchical"])
def test_one_machine_is_a_ring_inside(algorithm):
    assert all_reduce(1e6, 4, CLUSTER, algorithm) == ring(1e6, 4, LINK)
    assert all_reduce(1e6, 1, CLUSTER, algorithm) == 0


def test_several_machines():
    inside = ring(1e6, 4, LINK)
    assert all_reduce(1e6, 16, CLUSTER, "hierarchical") == inside + ring(1e6, 4, CLUSTER.between)
    assert all_reduce(1e6, 16, CLUSTER, "halving_doubling") == inside + halving_doubling(
        1e6, 4, CLUSTER.between
    )
    assert all_reduce(1e6, 16, CLUSTER, "ring") == ring(1e6, 16, CLUSTER.between)


def test_no_more_is_hidden_than_the_backward_pass_takes():
    communication = all_reduce(1e8, 8, CLUSTER, "hierarchical")
    assert communication > 0.1
    assert step_time(WORK, 8, CLUSTER, "hierarchical", 0) == 0.1 + communication
    assert step_time(WORK, 8, CLUSTER, "hierarchical", 1) == pytest.approx(
        0.1 + communication - 2 / 30
    )
    small = Work(compute=0.1, gradient_bytes=1e5)
    assert step_time(small, 8, CLUSTER, "hierarchical", 1) == pytest.approx(0.1)
    assert step_time(small, 8, CLUSTER, "hierarchical", 0.5) == pytest.approx(
        0.1 + all_reduce(1e5, 8, CLUSTER, "hierarchical") / 2
    )


def test_efficiency():
    assert efficiency(WORK, 1, CLUSTER, "ring", 0) == 1
    assert efficiency(WORK, 8, CLUSTER, "ring", 0, base=8) == 1
    times = [step_time(WORK, n, CLUSTER, "ring", 0) for n in (4, 64)]
    assert efficiency(WORK, 64, CLUSTER, "ring", 0, base=4) == times[0] / times[1] < 1


def test_a_link_is_found_from_its_times():
    sizes = [1e3, 1e5, 1e7]
    found = fit_link(sizes, [ring(size, 2, LINK) for size in sizes], 2)
    assert found.latency == pytest.approx(LINK.latency)
    assert found.bandwidth == pytest.approx(LINK.bandwidth)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: Link(-1, 1), "latency must be at least 0 .* got Link"),
        (lambda: Link(0, 0), "bandwidth greater than 0"),
        (
            lambda: all_reduce(1, 6, CLUSTER, "ring"),
            "must be a multiple of the 4 devices of a machine, got 6",
        ),
        (
            lambda: all_reduce(1, 8, Cluster(LINK, None, 4), "ring"),
            "need 2 machines, but Cluster.between is None",
        ),
        (lambda: step_time(WORK, 8, CLUSTER, "ring", 1.5), "overlap must be from 0 to 1, got 1.5"),
    ],
)
def test_what_makes_no_sense_is_an_error(call, text):
    with pytest.raises(ValueError, match=text):
        call()
