"""Functions of the user's that a run calls between its loops (`ddl.run.callbacks`)."""

from ddl.run.callbacks import AfterEvaluation, AfterSave, EarlyStopping, Every, Moment

__all__ = ["AfterEvaluation", "AfterSave", "EarlyStopping", "Every", "Moment"]
