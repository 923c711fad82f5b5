"""Benchmarks. `python -m benchmarks` runs all but the long ones; with names, only those."""

BENCHMARKS = (
    "loop_overhead",
    "first_step",
    "precision",
    "scaling",
    "weak_scaling",
    "simulated_cluster",
    "input_pipelines",
    "step_cost",
    "progress_bar",
    "gan",
    "examples",
    "across_examples",
    "gather_cost",
    "cross_device",
    "tracing",
    "gpu_counts",
    "max_pooling",
    "augmentation",
    "gpt_cpu",
    "large_embeddings",
    "epoch_order",
    "checkpoint_cost",
    "memory",
    "parity",
)
"""Names in the order of the page. Each module ends with `benchmarks.command.main(measure)`."""

LONG = (
    "large_batch",
    "callback_cost",
    "large_data",
    "remat",
    "configs",
    "sharding",
    "batch_shards",
    "check_time",
    "split_table",
)
"""Benchmarks that run only when named."""

ON_GPU = ("gpu",)
"""Benchmarks that need a GPU. They run only when named."""
