"""Benchmarks. `python -m benchmarks` runs all but the long ones; with names, only those."""

BENCHMARKS = (
    *("loop_overhead", "replicas", "gan", "step_cost", "first_step", "input", "embeddings"),
    *("weak_scaling", "checkpoint_cost", "memory"),
    *("configs", "gpu_counts"),
)
"""Names in the order of the page. Each module ends with `harness.main(measure)`."""

LONG = ("large_batch",)
"""Benchmarks that run only when named."""

ON_GPU = ("gpu",)
"""Benchmarks that need a GPU. They run only when named."""
