"""Data: the order of examples, their sources, and batches for the replicas."""
