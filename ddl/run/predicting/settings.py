"""The part of a config that says what to predict."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from ddl.data.conversion import as_source
from ddl.data.source import Source
from ddl.data.stream import Stream
from ddl.errors import ConfigError, DataError
from ddl.training.trainer import Trainer

_WEIGHT = "weight"


@dataclasses.dataclass(frozen=True)
class Predictions:
    """Settings of `--mode=predict`: data and columns.

    Attributes:
      data: The examples; None takes the evaluation data. They need no labels. A source without
        parentheses, as `@images`, is built only by `--mode=predict`.
      features: Names of features to write beside the outputs, such as a label or a number that
        names the example. The feature "weight" is always written, if the data have it.

    Raises:
      ConfigError: If `features` is not a list of names.
    """

    data: Any = None
    features: Sequence[str] = ()

    def __post_init__(self) -> None:
        if isinstance(self.features, str) or not all(isinstance(n, str) for n in self.features):
            raise ConfigError(
                f"Predictions.features must be a list of names, got {self.features!r}. Write "
                "['label'], for example."
            )

    @property
    def place_of_data(self) -> str:
        """Name of the argument that gives the examples."""
        return "Trainer.eval_data" if self.data is None else "Predictions.data"

    def source(self, trainer: Trainer) -> Source | Stream:
        """Returns the examples.

        Raises:
          ConfigError: If neither the config nor the trainer has any.
          DataError: If the data have no end or lack a feature.
        """
        data = self.data() if callable(self.data) else self.data
        if data is None:
            if trainer.eval_pipeline is None:
                raise ConfigError(
                    "--mode=predict has no data: the config binds neither Predictions.data nor "
                    "Trainer.eval_data. Bind one of them."
                )
            data = trainer.eval_pipeline.source
        source = as_source(data)
        if isinstance(source, Stream) and source.is_endless:
            raise DataError(
                "--mode=predict needs data with an end, got endless data. Pass data of known "
                "length in Predictions.data."
            )
        if absent := set(self.features) - source.element_spec.keys():
            raise DataError(
                f"Predictions.features names {min(absent)!r}, which the data do not have, only "
                f"{', '.join(sorted(source.element_spec))}. Name some of these."
            )
        return source

    def features_of(self, source: Source | Stream) -> tuple[str, ...]:
        """Returns the names of the features to write, each once."""
        own = [_WEIGHT] if _WEIGHT in source.element_spec else []
        return tuple(dict.fromkeys([*self.features, *own]))
