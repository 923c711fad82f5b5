"""Asynchronous training and evaluation, with parameter servers."""
