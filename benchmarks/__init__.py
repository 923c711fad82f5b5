"""Benchmarks. `python -m benchmarks` runs all but the long ones; with names, only those."""

BENCHMARKS = (
    "loop_overhead",
    "first_step",
    "scaling",
    "weak_scaling",
    "simulated_cluster",
    "input_pipelines",
    "step_cost",
    "gan",
    "examples",
    "gpu_counts",
    "gpt_cpu",
    "large_embeddings",
    "checkpoint_cost",
    "memory",
    "parity",
)
"""Names in the order of the page. Each module ends with `benchmarks.command.main(measure)`."""

LONG = (
    "large_batch",
    "configs",
    "check_time",
)
"""Benchmarks that run only when named."""

ON_GPU = ("gpu",)
"""Benchmarks that need a GPU. They run only when named."""
