"""Functions of the user's that a run calls between its loops."""

from ddl.callbacks.early_stopping import EarlyStopping
from ddl.callbacks.moment import Moment
from ddl.callbacks.pictures import ConfusionMatrix, SampleImages
from ddl.callbacks.schedule import AfterEvaluation, AfterSave, Callback, Every
from ddl.callbacks.worst_examples import WorstExamples

__all__ = [
    "AfterEvaluation",
    "AfterSave",
    "Callback",
    "ConfusionMatrix",
    "EarlyStopping",
    "Every",
    "Moment",
    "SampleImages",
    "WorstExamples",
]
