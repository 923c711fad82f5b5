"""Console output of a run: a summary, a progress bar on a terminal, lines elsewhere."""

import datetime
from collections.abc import Mapping, Sequence
from typing import IO, cast

from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Table
from rich.text import Text

from ddl.output import printable, standard_output

_ORDER = ("loss", "accuracy")
# Columns of the terminal for the bar itself and for the times.
_BAR_WIDTH, _TIMES_WIDTH = 10, len("0:00:00 · 0:00:00 left")


class RunConsole:
    """The console of a run: a line per log, and on a terminal a progress bar below.

    Output that fails never ends a run (`ddl.output`), and a name is never read as markup or as a
    control sequence of the terminal.
    """

    def __init__(self, console: Console | None = None, shows: bool = True):
        """Opens the console.

        Args:
          console: Console to print on; None makes one on standard output.
          shows: Whether the console on standard output prints anything.
        """
        self._console = console or Console(
            file=cast(IO[str], standard_output()),
            highlight=False,
            soft_wrap=True,
            quiet=not shows,
        )
        self._progress: Progress | None = None
        self._room = 0  # columns of the terminal for figures beside the bar

    def summary(self, title: str, rows: Mapping[str, str]) -> None:
        """Prints names and texts: a table on a terminal, `name: text` lines elsewhere."""
        if not self._console.is_terminal:
            for name, text in rows.items():
                self.line(f"{name}: {text}")
            return
        table = Table(title=title, title_justify="left", show_header=False, box=None)
        table.add_column(style="bold")
        table.add_column()
        for name, text in rows.items():
            table.add_row(Text(printable(name)), Text(printable(text)))
        self._console.print(table)

    def line(self, text: str) -> None:
        """Prints a text, above the progress bar if there is one."""
        self._console.print(Text(printable(text)))

    def start(self, step: int, total: int) -> None:
        """Shows the progress bar on a terminal, from `step` to `total`."""
        if not self._console.is_terminal:
            return
        others = len(f"{total:,}/{total:,} steps") + _BAR_WIDTH + _TIMES_WIDTH
        self._room = self._console.width - others - 3  # a space between two of the four columns
        self._progress = Progress(
            TextColumn("{task.completed:,}/{task.total:,} steps"),
            *([BarColumn(bar_width=_BAR_WIDTH)] if self._room >= 0 else []),
            TextColumn("{task.fields[figures]}", markup=False),
            _Times(),
            console=self._console,
        )
        self._progress.start()
        self._progress.add_task("train", total=total, completed=step, figures="")

    @property
    def shows_progress(self) -> bool:
        """Whether a progress bar is shown."""
        return self._progress is not None

    def advance(self, step: int, figures: Mapping[str, float]) -> None:
        """Updates the progress bar, if there is one."""
        if self._progress is not None:
            task = self._progress.task_ids[0]
            text = _fitting([printable(part) for part in _formatted(figures)], self._room)
            self._progress.update(task, completed=step, figures=text)

    def write(self, step: int, epoch: float, split: str, values: Mapping[str, float]) -> None:
        """Prints metrics as a line; see `writers.Writer`."""
        self.line(f"step {step:,} · epoch {epoch:.2f} · {split} · {format_figures(values)}")

    def drop_after(self, last_step: int) -> None:
        """Does nothing: printed lines cannot be dropped."""

    def close(self) -> None:
        """Stops the progress bar and leaves it on the screen."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


class _Times(ProgressColumn):
    """The time since the start and the time to the end: '0:01:30 · 0:12:00 left'."""

    def render(self, task: Task) -> Text:
        return Text(f"{_clock(task.elapsed)} · {_clock(task.time_remaining)} left")


def _clock(seconds: float | None) -> str:
    return "-:--:--" if seconds is None else str(datetime.timedelta(seconds=int(seconds)))


def format_figures(figures: Mapping[str, float]) -> str:
    """Formats metrics, loss first: 'loss 0.0312 · accuracy 0.9910 · 12,345 examples/s'."""
    return " · ".join(_formatted(figures))


def _fitting(parts: Sequence[str], room: int) -> str:
    """Joins as many whole parts, from the first on, as fit into `room` columns."""
    text = ""
    for part in parts:
        longer = f"{text} · {part}" if text else part
        if cell_len(longer) > room:
            break
        text = longer
    return text


def _formatted(figures: Mapping[str, float]) -> list[str]:
    names = [name for name in _ORDER if name in figures]
    names += [name for name in figures if name not in _ORDER]
    parts = []
    for name in names:
        value = figures[name]
        if name == "examples_per_second":
            parts.append(f"{value:,.0f} examples/s")
        elif name in ("loss_scale", "skipped_updates", "rewinds"):
            parts.append(f"{name.replace('_', ' ')} {value:,.0f}")
        elif name.endswith("accuracy"):
            parts.append(f"{name.replace('_', ' ')} {value:.4f}")
        else:
            parts.append(f"{name.replace('_', ' ')} {value:.4g}")
    return parts
