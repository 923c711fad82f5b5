"""Checkpoints: contents, writing, retention, restoring, warm start and export."""
