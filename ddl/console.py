"""What a person sees: a summary at the start, a progress bar on a terminal, lines elsewhere."""

from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

_ORDER = ("loss", "accuracy")


class RunConsole:
    """The console of a run. On a terminal a bar moves; elsewhere a line comes with each log."""

    def __init__(self, console: Console | None = None, shows: bool = True):
        """Writes to standard output unless another console is given, or nothing is to be shown."""
        self._console = console or Console(highlight=False, soft_wrap=True, quiet=not shows)
        self._progress: Progress | None = None

    def summary(self, title: str, rows: Mapping[str, str]) -> None:
        """Prints names and texts in two columns."""
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
        """Prints one line, above the bar where there is one."""
        self._console.print(text, markup=False, highlight=False)

    def start(self, step: int, total: int) -> None:
        """Shows the bar, on a terminal."""
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
        """Whether there is a bar to move."""
        return self._progress is not None

    def advance(self, step: int, figures: Mapping[str, float]) -> None:
        """Moves the bar."""
        if self._progress is not None:
            task = self._progress.task_ids[0]
            self._progress.update(task, completed=step, figures=format_figures(figures))

    def write(self, step: int, epoch: float, split: str, values: Mapping[str, float]) -> None:
        """See `ddl.writers.Writer`. Training figures are a line only where there is no bar."""
        if split == "train" and self._progress is not None:
            return
        self.line(f"step {step:,} · epoch {epoch:.2f} · {split} · {format_figures(values)}")

    def drop_after(self, last_step: int) -> None:
        """Nothing that was shown can be taken back."""

    def close(self) -> None:
        """Leaves the bar as it stands."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def format_figures(figures: Mapping[str, float]) -> str:
    """Figures on one line, loss first: 'loss 0.0312 · accuracy 0.9910 · 12,345 examples/s'."""
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
