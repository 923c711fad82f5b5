"""Alias of `ddl.distribution.workers`, the former documented place of `Workers`."""

from ddl.distribution.workers import Workers

__all__ = ["Workers"]
