"""Predictions of a run's weights, written to a file that a killed command resumes."""
