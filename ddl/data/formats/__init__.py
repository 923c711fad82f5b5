"""Data sets in files of common formats."""

from ddl.data.formats.image_folder import ImageFolder
from ddl.data.formats.numpy_files import numpy_files
from ddl.data.formats.record_features import record_files
from ddl.data.formats.tables import table
from ddl.data.formats.text import text_lines, token_windows

__all__ = [
    "ImageFolder",
    "numpy_files",
    "record_files",
    "table",
    "text_lines",
    "token_windows",
]
