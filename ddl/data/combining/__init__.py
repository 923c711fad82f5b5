"""Data sets made of others: parts, folds, concatenations and mixtures."""

from ddl.data.combining.concatenation import concatenation
from ddl.data.combining.damaged import skip_damaged
from ddl.data.combining.mixture import Mixture
from ddl.data.combining.parts import k_fold, subset

__all__ = ["Mixture", "concatenation", "k_fold", "skip_damaged", "subset"]
