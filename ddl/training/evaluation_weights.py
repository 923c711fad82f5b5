"""The weights for evaluation and export: the averages, if the trainer keeps some."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from ddl.errors import ConfigError
from ddl.step.weight_average import WeightAverages


class EvaluationWeights:
    """Gives the model the averages of its weights within a `with` block.

    An evaluation never changes the run.
    """

    def __init__(self, averages: WeightAverages | None):
        """Keeps the averages that the trainer keeps, if any; changes no variable."""
        self._averages = averages
        self._blocks = 0
        self._restoring = ExitStack()

    @contextmanager
    def applied(self, averaged: bool = True) -> Iterator[None]:
        """Assigns the weights for evaluation within the `with` block.

        Weights become their averages, if kept and if `averaged` is True. Afterwards all values are
        restored bit for bit. A nested block changes nothing. Blocks of generators may end in any
        order: the last one that ends restores the values. Eager, cross-replica context, on all
        workers.
        """
        if not self._blocks:
            with ExitStack() as stack:
                if averaged and self._averages is not None:
                    stack.enter_context(self._averages.applied())
                self._restoring = stack.pop_all()
        self._blocks += 1
        try:
            yield
        finally:
            self._blocks -= 1
            if not self._blocks:
                self._restoring.close()

    def check_not_applied(self) -> None:
        """Raises ConfigError within `applied`."""
        if self._blocks:
            raise ConfigError(
                "The model holds the evaluation weights. Leave the evaluation_weights() block, and "
                "read the iterators of predict_batches to their end or close() them, before "
                "training, saving or restoring."
            )
