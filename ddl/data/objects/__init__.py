"""Data that Python objects give: generators, data sets of other libraries, Keras's PyDataset."""

from ddl.data.objects.endless import EndlessSource, endless
from ddl.data.objects.items import from_items
from ddl.data.objects.libraries import hugging_face, tfds
from ddl.data.objects.py_dataset import PyDatasetSource

__all__ = ["EndlessSource", "PyDatasetSource", "endless", "from_items", "hugging_face", "tfds"]
