"""Gradients of single rows of a table: which tables have them, and their sums."""
