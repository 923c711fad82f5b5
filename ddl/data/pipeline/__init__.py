"""Pipelines that pass batches to the replicas."""

from ddl.data.pipeline.batch import Batch
from ddl.data.pipeline.on_workers import WorkerBatches
from ddl.data.pipeline.pipeline import BatchPipeline

__all__ = ["Batch", "BatchPipeline", "WorkerBatches"]
