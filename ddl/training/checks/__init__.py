"""Checks before training: batch sizes, the model, row independence, fixed settings."""
