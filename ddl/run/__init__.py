"""Runs, from a config or from Python: training, evaluation, export and predictions."""
