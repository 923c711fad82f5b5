"""The argument of a callback: the moment of the run at which it is called."""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from ddl.distribution.workers import Workers
from ddl.errors import ConfigError
from ddl.seeds import hashed
from ddl.training.trainer import Trainer

Kind = Literal["image", "text", "histogram"]


class MediaWriter(Protocol):
    """Writes images, texts and histograms, such as to TensorBoard."""

    def write_media(self, step: int, split: str, kind: Kind, name: str, value: Any) -> None:
        """Writes one value of a split at a step; see `Media` for its form."""
        ...


class Media:
    """Images, texts and histograms for TensorBoard.

    Only the chief of a run with a model directory writes them; elsewhere they are only checked.
    """

    def __init__(self, writer: MediaWriter | None, step: int, split: str, callback: str):
        """Keeps the arguments; `writer` None writes nothing. Errors name the callback."""
        self._writer = writer
        self._step = step
        self._split = split
        self._callback = callback

    def images(self, name: str, images: Any) -> None:
        """Writes images.

        Args:
          name: Name in TensorBoard.
          images: [n, height, width, channels] with 1, 3 or 4 channels, or one image without n;
            uint8, or floats from 0 to 1.

        Raises:
          ConfigError: If shape, dtype or range differ.
        """
        array = np.asarray(images)
        array = array[np.newaxis] if array.ndim == 3 else array
        floats = np.issubdtype(array.dtype, np.floating)
        if array.ndim != 4 or array.shape[-1] not in (1, 3, 4) or 0 in array.shape:
            raise ConfigError(
                f"{self._call('images', name)}: images must be [n, height, width, channels] with "
                f"1, 3 or 4 channels, got shape {np.shape(images)}. Reshape them; "
                "images[..., np.newaxis] adds a channel."
            )
        if not floats and array.dtype != np.uint8:
            raise ConfigError(
                f"{self._call('images', name)}: images must be uint8, or floats from 0 to 1, got "
                f"{array.dtype}. Convert them, such as by .astype('uint8')."
            )
        if floats and not (array.min() >= 0 and array.max() <= 1):
            raise ConfigError(
                f"{self._call('images', name)}: images must be uint8, or floats from 0 to 1, got "
                f"values from {array.min():.4g} to {array.max():.4g}. Scale or clip them."
            )
        self._write("image", name, array.astype(np.float32) if floats else array)

    def text(self, name: str, text: str) -> None:
        """Writes a text, which TensorBoard shows as Markdown.

        Raises:
          ConfigError: If it is no text.
        """
        if not isinstance(text, str):
            raise ConfigError(
                f"{self._call('text', name)}: the text must be a str, got {type(text).__name__}. "
                "Pass str(text)."
            )
        self._write("text", name, text)

    def histogram(self, name: str, values: Any) -> None:
        """Writes a histogram of numbers of any shape.

        Raises:
          ConfigError: If there are none, or one is not finite.
        """
        array = np.asarray(values, np.float64)
        if not array.size or not np.isfinite(array).all():
            raise ConfigError(
                f"{self._call('histogram', name)} needs finite numbers, at least one, got "
                f"{array.size:,} values, {np.count_nonzero(~np.isfinite(array)):,} of them not "
                "finite. Leave these out: values[np.isfinite(values)]."
            )
        self._write("histogram", name, array.ravel())

    def _call(self, method: str, name: str) -> str:
        return f"moment.write.{method}({name!r}) in the callback {self._callback}"

    def _write(self, kind: Kind, name: str, value: Any) -> None:
        if self._writer is not None:
            self._writer.write_media(self._step, self._split, kind, name, value)


class Moment:
    """The moment of a run at which a callback is called. Eager, cross-replica context.

    Attributes:
      trainer: The trainer. A callback may read it, evaluate, predict, and assign to the variables
        of its task; it must not train or restore.
      step: Number of updates made.
      epoch: Passes over the training data.
      write: Writes images, texts and histograms to TensorBoard.
      is_chief: Whether this process writes the run's files.
      checkpoint: After a save, the checkpoint's path without the endings of its files; else None.
    """

    def __init__(
        self,
        trainer: Trainer,
        figures: Callable[[], Mapping[str, float]],
        write: Media,
        end: Callable[[str], None],
        name: str,
        checkpoint: Path | None = None,
    ):
        """Keeps the arguments.

        Args:
          trainer: The trainer.
          figures: Returns the figures when the callback reads them.
          write: Writes to TensorBoard.
          end: Ends the run for a reason.
          name: Name of the callback, which selects its stream of random numbers.
          checkpoint: See the class.
        """
        self.trainer = trainer
        self.step = trainer.step
        self.epoch = trainer.epoch_at(trainer.step)
        self.write = write
        self.is_chief = Workers(trainer.strategy).is_chief
        self.checkpoint = checkpoint
        self._figures = figures
        self._end = end
        self._name = name

    @functools.cached_property
    def figures(self) -> dict[str, float]:
        """Loss and metrics: of the evaluation, or of training since the last log."""
        return dict(self._figures())

    @functools.cached_property
    def random(self) -> np.random.Generator:
        """Random numbers that depend only on the run's seed, the callback's name and the step.

        A further callback of the same name draws other numbers.
        """
        first = next(iter(self.trainer.pipelines.values()))
        return np.random.default_rng(hashed(first.seed, self._name, self.step) % 2**64)

    @property
    def data(self) -> Any:
        """The training data, or each source by its name."""
        sources = {name: one.source for name, one in self.trainer.pipelines.items()}
        return sources.get("", sources)

    def end(self, reason: str) -> None:
        """Ends the run after this step, and after saving. The run then counts as done.

        Args:
          reason: Why, for the line that the run prints.
        """
        self._end(str(reason))
