"""The loop over updates on the devices: how it repeats them, ends, and explains its errors."""

from ddl.training.loop.training_loop import TrainingLoop

__all__ = ["TrainingLoop"]
