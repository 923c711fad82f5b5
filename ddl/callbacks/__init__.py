"""Functions of the user's that a run calls between its loops."""

from ddl.callbacks.early_stopping import EarlyStopping
from ddl.callbacks.moment import Moment
from ddl.callbacks.schedule import AfterEvaluation, AfterSave, Callback, Every

__all__ = [
    "AfterEvaluation",
    "AfterSave",
    "Callback",
    "EarlyStopping",
    "Every",
    "Moment",
]
