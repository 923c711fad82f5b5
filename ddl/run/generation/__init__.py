"""Texts drawn from the model of a run."""
