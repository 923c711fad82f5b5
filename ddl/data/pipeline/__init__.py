"""Pipelines that pass batches to the replicas."""

from ddl.data.pipeline.batch import Batch
from ddl.data.pipeline.live import LivePipeline, pipeline_type
from ddl.data.pipeline.on_workers import WorkerBatches
from ddl.data.pipeline.pipeline import BatchPipeline

__all__ = ["Batch", "BatchPipeline", "LivePipeline", "WorkerBatches", "pipeline_type"]
