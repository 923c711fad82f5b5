"""Trackers of experiments, to which a run sends its figures: Weights & Biases, MLflow."""

from ddl.run.trackers.ml_flow import MLflow
from ddl.run.trackers.tracker import Session, Tracker
from ddl.run.trackers.weights_and_biases import WeightsAndBiases

__all__ = ["MLflow", "Session", "Tracker", "WeightsAndBiases"]
