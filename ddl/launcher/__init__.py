"""Clusters on one machine: processes, logs, restarts. Imports no TensorFlow."""
