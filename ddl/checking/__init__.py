"""Check that a task computes the same on any number of devices, and after a resume.

    from ddl.checking import check

    report = check(make_trainer)
    assert report.same, report

`make_trainer` takes a `tf.distribute.Strategy` and returns a new `ddl.Trainer`.
"""

from ddl.checking.checked import check
from ddl.checking.from_config import TrainerOfConfig
from ddl.checking.report import Difference, Report

__all__ = ["Difference", "Report", "TrainerOfConfig", "check"]
