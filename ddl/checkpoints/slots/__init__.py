"""Slots in shares, which checkpoints hold whole: a run resumes on any number of replicas."""

from ddl.checkpoints.slots.whole import WholeSlot, with_whole_slots

__all__ = ["WholeSlot", "with_whole_slots"]
