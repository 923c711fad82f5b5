"""Runs: training, evaluation and export from a config."""
