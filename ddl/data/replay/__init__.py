"""Data that a run makes itself."""

from ddl.data.replay.buffer import ReplayBuffer

__all__ = ["ReplayBuffer"]
