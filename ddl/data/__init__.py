"""Data sources, the order of their examples, and batches for the replicas."""

from ddl.data.arrays import ArraySource
from ddl.data.combining import Mixture, concatenation, k_fold, skip_damaged, subset
from ddl.data.conversion import as_source
from ddl.data.decoded import DecodedSource
from ddl.data.formats import (
    ImageFolder,
    numpy_files,
    record_files,
    table,
    text_lines,
    token_windows,
)
from ddl.data.imagenet import imagenet
from ddl.data.images import images
from ddl.data.keras_datasets import load_keras_dataset
from ddl.data.objects import (
    EndlessSource,
    PyDatasetSource,
    endless,
    from_items,
    hugging_face,
    tfds,
)
from ddl.data.order import batch_indices, steps_per_epoch
from ddl.data.packaged import load_digits, penguins, romeo_and_juliet, shapes
from ddl.data.pipeline import BatchPipeline
from ddl.data.random_access import RandomAccessSource
from ddl.data.records import RecordSource
from ddl.data.source import IndexedSource, Source
from ddl.data.stream import StreamSource
from ddl.data.synthetic import synthetic_arrays, synthetic_images
from ddl.data.varying import packed, token_lines

__all__ = [
    "ArraySource",
    "BatchPipeline",
    "DecodedSource",
    "EndlessSource",
    "ImageFolder",
    "IndexedSource",
    "Mixture",
    "PyDatasetSource",
    "RandomAccessSource",
    "RecordSource",
    "Source",
    "StreamSource",
    "as_source",
    "batch_indices",
    "concatenation",
    "endless",
    "from_items",
    "hugging_face",
    "imagenet",
    "images",
    "k_fold",
    "load_digits",
    "load_keras_dataset",
    "numpy_files",
    "packed",
    "penguins",
    "record_files",
    "romeo_and_juliet",
    "shapes",
    "skip_damaged",
    "steps_per_epoch",
    "subset",
    "synthetic_arrays",
    "synthetic_images",
    "table",
    "text_lines",
    "tfds",
    "token_lines",
    "token_windows",
]
