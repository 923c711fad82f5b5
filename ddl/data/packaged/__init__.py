"""Data that come with ddl, and need no network."""

from ddl.data.packaged.digits import load_digits
from ddl.data.packaged.penguins import penguins
from ddl.data.packaged.play import romeo_and_juliet
from ddl.data.packaged.shapes import shapes

__all__ = ["load_digits", "penguins", "romeo_and_juliet", "shapes"]
