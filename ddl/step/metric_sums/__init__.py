"""Metrics as one vector of sums: its layout, and its values from what a loss returns."""

from ddl.step.metric_sums.vector import MetricSums, SumsOfLosses

__all__ = ["MetricSums", "SumsOfLosses"]
