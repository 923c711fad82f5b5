"""Checks before training: batch sizes, the model, row independence, settings that are fixed."""
