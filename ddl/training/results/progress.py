"""Progress bars: of rich on a terminal, of HTML in a notebook, none elsewhere."""

import html
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Any, Protocol, cast

from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from ddl.figures import (
    EXAMPLES_PER_SECOND,
    LOSS_SCALE,
    REWINDS,
    SKIPPED_UPDATES,
    is_one_of_many,
)
from ddl.output import Dropping, dropping, printable, say
from ddl.training.actions import EachLoop

_ORDER = ("loss", "accuracy")
# Columns of the terminal for the bar itself and for the times.
_BAR_WIDTH, _TIMES_WIDTH = 10, len("00d 00:00 · 00d 00:00 left")


class Bar(Protocol):
    """A progress bar."""

    def advance(self, step: int, figures: Mapping[str, float]) -> None:
        """Shows the step reached, and figures by name."""
        ...

    def close(self) -> None:
        """Ends the bar and leaves it on the screen."""
        ...


def open_console(shows: bool = True) -> Console:
    """Opens a console on standard output.

    A pipe gets no control codes, even with FORCE_COLOR, which a notebook sets for its commands.

    Args:
      shows: Whether the console prints anything.
    """
    return Console(
        file=cast(IO[str], dropping(sys.stdout)),
        highlight=False,
        soft_wrap=True,
        quiet=not shows,
        force_terminal=None if _on_terminal() else False,
        force_jupyter=False,  # a notebook shows standard output too
    )


def open_bar(console: Console, step: int, total: int) -> Bar | None:
    """Shows a bar from `step` to `total`; None where neither terminal nor notebook shows it.

    Args:
      console: The console, which prints lines above a bar on a terminal.
      step: Updates made.
      total: The step at the end.
    """
    if console.quiet:
        return None
    if console.is_terminal:
        return _TerminalBar(console, step, total)
    if isinstance(console.file, Dropping) and (display := _notebook_display()) is not None:
        return _NotebookBar(display, step, total)
    return None


@contextmanager
def shown(
    total: int, shows: bool, figures: Callable[[], Mapping[str, float]]
) -> Iterator[list[EachLoop]]:
    """Returns actions that show the progress of a training; none where no bar can be shown.

    The bar appears after the first loop, if that is not the last: short calls show nothing.

    Args:
      total: The step at the end.
      shows: Whether to show a bar at all.
      figures: Returns the figures to show.
    """
    if not shows or not (_on_terminal() or in_notebook()):
        yield []
        return
    bar: Bar | None = None

    def show(step: int) -> None:
        nonlocal bar
        if bar is None and step < total:
            bar = open_bar(open_console(), step, total)
        if bar is not None:
            bar.advance(step, figures())

    try:
        yield [EachLoop(show)]
    finally:
        if bar is not None:
            bar.close()


class _TerminalBar:
    def __init__(self, console: Console, step: int, total: int):
        others = len(f"{total:,}/{total:,} steps") + _BAR_WIDTH + _TIMES_WIDTH
        self._room = console.width - others - 3  # a space between two of the four columns
        self._progress = Progress(
            TextColumn("{task.completed:,}/{task.total:,} steps"),
            *([BarColumn(bar_width=_BAR_WIDTH)] if self._room >= 0 else []),
            TextColumn("{task.fields[figures]}", markup=False),
            _Times(),
            console=console,
            refresh_per_second=4,  # a refresh takes a millisecond of the processor
        )
        self._progress.start()
        self._progress.add_task("train", total=total, completed=step, figures="")

    def advance(self, step: int, figures: Mapping[str, float]) -> None:
        task = self._progress.task_ids[0]
        text = _fitting([printable(part) for part in formatted(figures)], self._room)
        self._progress.update(task, completed=step, figures=text)

    def close(self) -> None:
        self._progress.stop()


class _Times(ProgressColumn):
    """The time since the start and the time to the end: '0:01:30 · 0:12:00 left'."""

    def render(self, task: Task) -> Text:
        return Text(f"{_clock(task.elapsed)} · {_clock(task.time_remaining)} left")


class _NotebookBar:
    """An output of the cell that is replaced, by IPython's display alone."""

    def __init__(self, display: Callable[..., Any], step: int, total: int):
        self._first, self._total = step, total
        self._since = time.monotonic()
        self._shown = display(self._content(step, {}), raw=True, display_id=True)

    def advance(self, step: int, figures: Mapping[str, float]) -> None:
        if self._shown is None:
            return
        try:
            self._shown.update(self._content(step, figures), raw=True)
        except Exception as error:  # of the connection to the browser: training goes on
            self._shown = None
            say(f"The progress bar cannot be shown: {error}. Training continues without it.")

    def close(self) -> None:
        pass

    def _content(self, step: int, figures: Mapping[str, float]) -> dict[str, str]:
        elapsed = time.monotonic() - self._since
        made = step - self._first
        left = elapsed / made * (self._total - step) if made else None
        steps = f"{step:,}/{self._total:,} steps"
        times = f"{_clock(elapsed)} · {_clock(left)} left"
        text = printable(" · ".join([*formatted(figures), times]))
        bar = f"<progress value={step} max={self._total}></progress>"
        return {
            "text/plain": f"{steps} · {text}",
            "text/html": f"<div>{steps} {bar} {html.escape(text)}</div>",
        }


def _on_terminal() -> bool:
    """Returns whether standard output is a terminal."""
    try:
        return bool(dropping(sys.stdout).isatty())
    except ValueError:  # it is closed
        return False


def in_notebook() -> bool:
    """Returns whether this process is the kernel of a notebook."""
    shell = sys.modules.get("IPython")
    running = None if shell is None else shell.get_ipython()
    return hasattr(running, "kernel")


def is_interactive() -> bool:
    """Returns whether a user types into this process: a notebook, IPython, or Python's prompt."""
    shell = sys.modules.get("IPython")
    has_prompt = hasattr(sys, "ps1") or bool(sys.flags.interactive)
    return has_prompt or (shell is not None and shell.get_ipython() is not None)


def _notebook_display() -> Callable[..., Any] | None:
    """Returns IPython's display in a notebook; None elsewhere."""
    if not in_notebook():
        return None
    from IPython.display import display

    return cast(Callable[..., Any], display)


def _clock(seconds: float | None) -> str:
    """Formats a time as '1:30:05', from a day on as '3d 12:20', from 100 days on as '345d'."""
    if seconds is None:
        return "-:--:--"
    days, rest = divmod(int(seconds), 86_400)
    hours, minutes = divmod(rest // 60, 60)
    if days > 99:
        return f"{days}d"
    return f"{days}d {hours:02}:{minutes:02}" if days else f"{hours}:{minutes:02}:{rest % 60:02}"


def format_figures(figures: Mapping[str, float]) -> str:
    """Formats metrics, loss first: 'loss 0.0312 · accuracy 0.9910 · 12,345 examples/s'."""
    return " · ".join(formatted(figures))


def _fitting(parts: Sequence[str], room: int) -> str:
    """Joins as many whole parts, from the first on, as fit into `room` columns."""
    text = ""
    for part in parts:
        longer = f"{text} · {part}" if text else part
        if cell_len(longer) > room:
            break
        text = longer
    return text


def formatted(figures: Mapping[str, float]) -> list[str]:
    """Formats each figure by its kind, loss first; leaves out those of layers and classes."""
    names = [name for name in _ORDER if name in figures]
    names += [name for name in figures if name not in _ORDER and not is_one_of_many(name)]
    parts = []
    for name in names:
        value = figures[name]
        if name == EXAMPLES_PER_SECOND:
            parts.append(f"{value:,.0f} examples/s")
        elif name in (LOSS_SCALE, SKIPPED_UPDATES, REWINDS):
            parts.append(f"{name.replace('_', ' ')} {value:,.0f}")
        elif name.endswith("accuracy"):
            parts.append(f"{name.replace('_', ' ')} {value:.4f}")
        else:
            parts.append(f"{name.replace('_', ' ')} {value:.4g}")
    return parts
