"""Figures that need all outputs of an evaluation at once, such as BLEU and rank correlations."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ddl.errors import ConfigError, check_takes
from ddl.figures import is_reserved

Function = Callable[[Any, dict[str, np.ndarray]], Mapping[str, float]]


class CorpusMetric:
    """A function of all outputs and features of an evaluation, in order and without padding.

    Examples of weight 0 are not passed.

        def spearman(outputs, features):
            return {"spearman": scipy.stats.spearmanr(outputs, features["label"]).statistic}

        ddl.Trainer(…, corpus_metrics=CorpusMetric(spearman, ["spearman"], features=["label"]))

    After each evaluation, the model runs over the data once more, with the method `predict` of the
    task. The function is called on the chief; all workers get its figures.

    Attributes:
      names: Names of the figures.
      features: Names of the features that the function gets; None: all.
    """

    def __init__(
        self,
        function: Function,
        names: Sequence[str],
        *,
        features: Sequence[str] | None = None,
    ):
        """Keeps the arguments.

        Args:
          function: Called with the outputs, arrays [n, …] in the structure that `predict` of the
            task returns, and a dict of the features [n, …]. Returns a dict from each of `names` to
            a number.
          names: Names of the figures.
          features: Names of the features that the function reads; "weight" are the weights of the
            examples, if the data have any. None: all features.

        Raises:
          ConfigError: If the names are no list, or one is reserved.
        """
        check_takes("CorpusMetric.function", function, ("outputs", "features"))
        if isinstance(names, str) or isinstance(features, str) or not names or "" in names:
            raise ConfigError(
                "CorpusMetric.names and features must be lists of names, got "
                f"{names!r:.80} and {features!r:.80}. Write ['bleu'] for one."
            )
        if taken := ", ".join(name for name in names if is_reserved(name)):
            raise ConfigError(f"CorpusMetric.names has names of ddl's own: {taken}. Rename them.")
        self.names = tuple(names)
        self.features = None if features is None else tuple(features)
        self._function = function

    def __call__(self, outputs: Any, features: dict[str, np.ndarray]) -> dict[str, float]:
        """Returns the figures by name. On the chief.

        Raises:
          ConfigError: If the function returns other names, or values that are no numbers.
        """
        found = self._function(outputs, features)
        try:
            figures = {name: float(found[name]) for name in self.names}
        except (TypeError, ValueError, KeyError):
            figures = {}
        if not figures or len(found) != len(figures):
            raise ConfigError(
                "The function of CorpusMetric must return a dict from each figure, "
                f"{', '.join(self.names)}, to a number, got {found!r:.160}. Correct it."
            )
        return figures


def checked_corpus_metrics(given: Any, names: Sequence[str]) -> tuple[CorpusMetric, ...]:
    """Returns the argument `corpus_metrics` of `ddl.Trainer` as a tuple.

    Args:
      given: The argument.
      names: Names of the other figures of an evaluation.

    Raises:
      ConfigError: If it is neither CorpusMetric nor a list of such, or two figures have one name.
    """
    several = tuple(given) if isinstance(given, list | tuple) else (given,)
    if not all(isinstance(one, CorpusMetric) for one in several):
        raise ConfigError(
            "Trainer.corpus_metrics must be a ddl.metrics.CorpusMetric, or a list of such, got "
            f"{given!r:.80}. Wrap a function, as in CorpusMetric(function, ['bleu'])."
        )
    every = [*names, *(name for one in several for name in one.names)]
    if twice := [name for name in every if every.count(name) > 1]:
        raise ConfigError(
            f"Two figures are called {twice[0]!r}: of the task, or of Trainer.corpus_metrics. "
            "Rename one."
        )
    return several
