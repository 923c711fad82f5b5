"""Texts drawn from the language model of a run."""

import dataclasses
from collections.abc import Sequence
from typing import IO, Any, cast

import numpy as np
from rich.console import Console

from ddl import config
from ddl.checkpoints.checkpoints import Checkpoints
from ddl.distribution.workers import Workers
from ddl.errors import ConfigError, DataError
from ddl.models import generate
from ddl.output import printable, standard_error, standard_output
from ddl.run.checks.config_changes import compare_with_saved_config
from ddl.run.console import RunConsole
from ddl.run.directory import RunDirectory
from ddl.run.from_checkpoints import SavedWeights, restore
from ddl.run.generation.text_codec import TextCodec
from ddl.run.placement import Placement
from ddl.run.train import build

_RULE = "-" * 40


@dataclasses.dataclass(frozen=True)
class Draws:
    """Settings for drawing tokens; see `ddl.models.generate`."""

    length: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0


def read_prompt(text: str | None, file: str | None) -> str:
    """Returns the prompt: a text, or that of a file.

    Raises:
      DataError: If the prompt is empty, or the file cannot be read or is not UTF-8.
    """
    if file is not None:
        try:
            with open(file, encoding="utf-8", newline="") as opened:
                text = opened.read()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(
                f"--prompt_file={file} cannot be read as UTF-8 text: {error}. Pass another file."
            ) from error
    if not text:
        raise DataError(
            "The prompt is empty, but the first token is drawn given those before it. Pass at "
            "least one character, such as --prompt=$'\\n'."
        )
    return text


def generate_from_run(
    placement: Placement,
    model_dir: str,
    prompt: str | Sequence[int],
    draws: Draws,
    *,
    samples: int = 1,
    weights: SavedWeights | None = None,
    allow_unused: Sequence[str] = (),
) -> list[str]:
    """Returns continuations of a prompt by the model of a run, as the loaded gin config builds it.

    Eager, in one process, on the first device.

    Args:
      placement: Strategy and other settings from flags, of one replica.
      model_dir: Directory of the run.
      prompt: A text, or numbers of tokens.
      draws: How tokens are drawn.
      samples: Number of continuations.
      weights: Weights to draw with; None takes the newest checkpoint, and its averages if it has
        any.
      allow_unused: Names of bindings that may go unused.

    Returns:
      For each continuation: prompt and continuation as one text, or as numbers if the prompt is
      tokens.

    Raises:
      ConfigError: If the config is invalid, or the task has no model from tokens to logits.
      DataError: If the prompt holds a token outside of the vocabulary.
      ModelDirectoryError: If there is no such checkpoint, or it does not fit the config.
    """
    console = RunConsole(Console(file=cast(IO[str], standard_error()), soft_wrap=True))
    directory = RunDirectory(model_dir)
    run_plan, trainer = build(placement, Workers(placement.strategy), directory)
    codec: TextCodec = config.build("TextCodec")
    for line in config.check_all_used(allow_unused):
        console.line(line)
    model = trainer.model
    if model is None:
        raise ConfigError(
            f"{type(trainer.task).__name__} has no `model` to draw from. Give it an attribute "
            "model, from tokens [batch, positions] to logits."
        )
    compare_with_saved_config(directory, trainer, console, strict=False)
    checkpoints = Checkpoints(
        directory.checkpoints, trainer, run_plan.retention, report=console.line
    )
    what = weights or SavedWeights()
    restore(what, trainer, checkpoints, console)
    is_text = isinstance(prompt, str)
    tokens = codec.tokens(prompt, _vocabulary(model)) if isinstance(prompt, str) else list(prompt)
    _note_length(tokens, model, console)
    with trainer.evaluation_weights(averaged=what.averaged):
        rows: Any = np.array([tokens] * samples, np.int64)
        drawn = generate(model, rows, **dataclasses.asdict(draws))
    found = [[*tokens, *row] for row in drawn.tolist()]
    return [codec.text(each) if is_text else ",".join(map(str, each)) for each in found]


def _vocabulary(model: Any) -> int:
    """Returns the size of the vocabulary; 0 for a model that `generate` refuses."""
    shape = getattr(model, "output_shape", None)
    return int(shape[-1]) if isinstance(shape, tuple) and shape and shape[-1] else 0


def _note_length(tokens: Sequence[int], model: Any, console: RunConsole) -> None:
    """Says if the model does not see the whole prompt."""
    shape = getattr(model, "output_shape", None)
    positions = shape[1] if isinstance(shape, tuple) and len(shape) == 3 else None
    if positions is not None and len(tokens) > positions:
        console.line(
            f"The prompt has {len(tokens):,} tokens, of which the model sees the last "
            f"{positions:,}."
        )


def show(texts: Sequence[str]) -> None:
    """Prints texts on standard output, with a rule between them.

    A terminal gets no control characters, which it would obey; a pipe and a file get all.
    """
    output = standard_output()
    try:
        on_terminal = bool(output.isatty())
    except ValueError:  # it is closed
        on_terminal = False
    for number, text in enumerate(texts):
        if number:
            output.write(f"{_RULE}\n")
        output.write(f"{printable(text) if on_terminal else text}\n")
    output.flush()
