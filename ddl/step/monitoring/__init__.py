"""Observers of the trace of an update."""
