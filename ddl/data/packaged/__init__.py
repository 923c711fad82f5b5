"""Data that come with ddl, and need no network."""

from ddl.data.packaged.digits import load_digits
from ddl.data.packaged.play import romeo_and_juliet

__all__ = ["load_digits", "romeo_and_juliet"]
