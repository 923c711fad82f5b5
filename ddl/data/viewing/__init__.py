"""Batches as text and pictures, to look at."""

from ddl.data.viewing.figures import counts_of, described, rows_as_text
from ddl.data.viewing.pictures import as_png, as_text, is_picture

__all__ = ["as_png", "as_text", "counts_of", "described", "is_picture", "rows_as_text"]
