"""Data: the order of examples, their sources, and batches for the replicas."""

from ddl.data.combine import concatenate, k_fold, mix, subset
from ddl.data.conversion import as_source
from ddl.data.order import batch_indices
from ddl.data.pipeline import BatchPipeline
from ddl.data.readers.images import image_folder, imagenet, images, keras_dataset
from ddl.data.readers.packaged import digits, penguins, play, shapes, synthetic
from ddl.data.readers.records import array_records, tf_records
from ddl.data.readers.table import table
from ddl.data.readers.tokens import packed, token_lines, tokens
from ddl.data.source import Source
from ddl.data.stream import Stream, stream

__all__ = ["BatchPipeline", "Source", "Stream", "as_source", "batch_indices", "concatenate", "mix"]
__all__ += ["array_records", "digits", "image_folder", "imagenet", "images", "k_fold"]
__all__ += ["keras_dataset", "packed", "penguins", "play", "shapes", "stream", "subset"]
__all__ += ["synthetic", "table", "tf_records", "token_lines", "tokens"]
