"""Check that a task computes the same on any number of replicas and microbatches.

    from ddl.checking import check

    check("my_package.my_module:make_trainer").raise_if_different()

The processes of the check import TensorFlow; this process does not.
"""

from ddl.checking.checked import check, check_all, check_config
from ddl.checking.report import ComputationDiffers, Difference, Report

__all__ = [
    "ComputationDiffers",
    "Difference",
    "Report",
    "check",
    "check_all",
    "check_config",
]
