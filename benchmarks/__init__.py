"""Measurements. `python -m benchmarks` runs all but the long ones; with names, those named."""

BENCHMARKS = (
    "loop_overhead",
    "first_step",
    "precision",
    "scaling",
    "weak_scaling",
    "simulated_cluster",
    "input_pipelines",
    "step_cost",
    "cross_device",
    "max_pooling",
    "host_memory",
    "epoch_order",
    "checkpoint_cost",
    "memory",
    "parity",
)
"""In the order of the page. A module named here ends in `benchmarks.report.main(measure)`."""

LONG = {"large_batch": 3 * 3600}
"""Those that only their names run, and how many seconds each may take."""
