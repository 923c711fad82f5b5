"""Slots in shares; checkpoints hold them whole, so replicas may change."""

from ddl.checkpoints.slots.whole import WholeSlot, with_whole_slots

__all__ = ["WholeSlot", "with_whole_slots"]
