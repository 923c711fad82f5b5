"""Console output of a run: a summary, a progress bar on a terminal, lines elsewhere."""

from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

_ORDER = ("loss", "accuracy")


class RunConsole:
    """The console of a run: a progress bar on a terminal, a line per log elsewhere."""

    def __init__(self, console: Console | None = None, shows: bool = True):
        """Opens the console.

        Args:
          console: Console to print on; None makes one on standard output.
          shows: Whether the console on standard output prints anything.
        """
        self._console = console or Console(highlight=False, soft_wrap=True, quiet=not shows)
        self._progress: Progress | None = None

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
            table.add_row(name, text)
        self._console.print(table)

    def line(self, text: str) -> None:
        """Prints a text, above the progress bar if there is one."""
        self._console.print(text, markup=False, highlight=False)

    def start(self, step: int, total: int) -> None:
        """Shows the progress bar on a terminal, from `step` to `total`."""
        if not self._console.is_terminal:
            return
        self._progress = Progress(
            TextColumn("{task.completed:,}/{task.total:,} steps"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
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
            self._progress.update(task, completed=step, figures=format_figures(figures))

    def write(self, step: int, epoch: float, split: str, values: Mapping[str, float]) -> None:
        """Prints metrics as a line, except training metrics under a bar; see `writers.Writer`."""
        if split == "train" and self._progress is not None:
            return
        self.line(f"step {step:,} · epoch {epoch:.2f} · {split} · {format_figures(values)}")

    def drop_after(self, last_step: int) -> None:
        """Does nothing: printed lines cannot be dropped."""

    def close(self) -> None:
        """Stops the progress bar and leaves it on the screen."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def format_figures(figures: Mapping[str, float]) -> str:
    """Formats metrics, loss first: 'loss 0.0312 · accuracy 0.9910 · 12,345 examples/s'."""
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
    return " · ".join(parts)
