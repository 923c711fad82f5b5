"""Measurements. `python -m benchmarks` runs all, `python -m benchmarks.NAME` one of them."""

BENCHMARKS = (
    "loop_overhead",
    "first_step",
    "precision",
    "scaling",
    "weak_scaling",
    "simulated_cluster",
    "step_cost",
    "cross_device",
    "host_memory",
    "epoch_order",
    "checkpoint_cost",
    "memory",
    "parity",
    "large_batch",
)
"""In the order of the page. A module named here ends in `benchmarks.report.main(measure)`."""
