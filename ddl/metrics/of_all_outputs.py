"""Figures that need all outputs of an evaluation at once, such as BLEU and rank correlations."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ddl.errors import ConfigError, check_takes
from ddl.figures import is_reserved

Function = Callable[[Any, dict[str, np.ndarray]], Mapping[str, float]]


class OfAllOutputs:
    """A function of all outputs and features of an evaluation, in order and without padding.

    Examples of weight 0 are not passed.

        def spearman(outputs, features):
            return {"spearman": scipy.stats.spearmanr(outputs, features["label"]).statistic}

        ddl.Trainer(…, corpus_metrics=OfAllOutputs(spearman, ["spearman"], features=["label"]))

    After each evaluation, the model runs over the data once more, with the method `predict` of the
    task. The function is called on the chief; all workers get its figures.

    Attributes:
      names: Names of the figures.
      features: Names of the features that the function gets; None: all.
      max_bytes: Memory for outputs and features.
    """

    def __init__(
        self,
        function: Function,
        names: Sequence[str],
        *,
        features: Sequence[str] | None = None,
        max_bytes: int = 2**30,
    ):
        """Keeps the arguments.

        Args:
          function: Called with the outputs, arrays [n, …] in the structure that `predict` of the
            task returns, and a dict of the features [n, …]. Returns a dict from each of `names` to
            a number.
          names: Names of the figures.
          features: Names of the features that the function reads; "weight" are the weights of the
            examples, if the data have any. None: all features.
          max_bytes: Largest size of outputs and features, checked before they are computed.

        Raises:
          ConfigError: If the names are no list, or one is reserved.
        """
        check_takes("OfAllOutputs.function", function, ("outputs", "features"))
        if isinstance(names, str) or isinstance(features, str) or not names or "" in names:
            raise ConfigError(
                "OfAllOutputs.names must be a list of names, one for each figure, and features a "
                f"list or None, got {names!r:.80} and {features!r:.80}. Write ['bleu'] for one."
            )
        if taken := [name for name in names if is_reserved(name)]:
            raise ConfigError(
                "OfAllOutputs.names must not be names of ddl's own figures, got "
                f"{', '.join(taken)}. Rename the figure, here and in the function."
            )
        self.names = tuple(names)
        self.features = None if features is None else tuple(features)
        self.max_bytes = max_bytes
        self._function = function

    def __call__(self, outputs: Any, features: dict[str, np.ndarray]) -> dict[str, float]:
        """Returns the figures by name. On the chief.

        Raises:
          ConfigError: If the function returns other names, or values that are no numbers.
        """
        found = self._function(outputs, features)
        if not isinstance(found, Mapping) or set(found) != set(self.names):
            got = sorted(found) if isinstance(found, Mapping) else f"a {type(found).__name__}"
            raise ConfigError(
                f"The function of OfAllOutputs must return a dict with the figures "
                f"{', '.join(self.names)}, got {got}. Correct OfAllOutputs.names."
            )
        try:
            return {name: float(found[name]) for name in self.names}
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"The function of OfAllOutputs must return numbers, got {found!r:.160}. Convert "
                "them there, such as by float or np.mean."
            ) from error


def checked_corpus_metrics(given: Any) -> tuple[OfAllOutputs, ...]:
    """Returns the argument `corpus_metrics` of `ddl.Trainer` as a tuple.

    Raises:
      ConfigError: If it is neither OfAllOutputs nor a list of such, or two have the same name.
    """
    several = (given,) if isinstance(given, OfAllOutputs) else given
    if not isinstance(several, list | tuple) or not all(
        isinstance(one, OfAllOutputs) for one in several
    ):
        raise ConfigError(
            "Trainer.corpus_metrics must be a ddl.metrics.OfAllOutputs, or a list of such, got "
            f"{given!r:.80}. Wrap a function, as in OfAllOutputs(function, ['bleu'])."
        )
    names = [name for one in several for name in one.names]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(
            f"Two of Trainer.corpus_metrics have the figure {twice[0]!r}. Name each figure once."
        )
    return tuple(several)
