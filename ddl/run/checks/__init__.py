"""Checks of a plan and of learning rates before a run."""
