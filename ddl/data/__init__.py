"""Data: the order of examples, their sources, and batches for the replicas."""

from ddl.data.conversion import as_source
from ddl.data.order import batch_indices, steps_per_epoch
from ddl.data.pipeline import BatchPipeline
from ddl.data.source import Source

__all__ = ["BatchPipeline", "Source", "as_source", "batch_indices", "steps_per_epoch"]
