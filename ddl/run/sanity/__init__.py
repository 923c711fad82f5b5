"""Modes that look for errors before a real run: --overfit_batch and --fast_run."""
