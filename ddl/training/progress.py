"""Progress on a terminal or in a notebook: a line that is replaced; elsewhere nothing."""

import datetime
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any, cast

from rich.console import Console
from rich.live import Live
from rich.text import Text

from ddl.metrics.history import format_figures
from ddl.output import Dropping, dropping, printable, say


class Bar:
    """Steps, times and figures in a line, which rich or IPython replaces."""

    def __init__(self, console: Console, step: int, total: int):
        """Shows the line.

        Args:
          console: The console, which prints lines above it on a terminal.
          step: Updates made.
          total: The step at the end.
        """
        self._first, self._total, self._since = step, total, time.monotonic()
        self._live: Live | None = None
        self._cell: Any = None  # IPython's handle of what it displays
        text = self._text(step, {})
        if console.is_terminal:
            self._live = Live(text, console=console, auto_refresh=False)
            self._live.start()
        else:
            from IPython.display import display

            self._cell = display({"text/plain": text.plain}, raw=True, display_id=True)

    def advance(self, step: int, figures: Mapping[str, float]) -> None:
        """Shows the step reached, and figures by name."""
        text = self._text(step, figures)
        if self._live is not None:
            self._live.update(text, refresh=True)
        if self._cell is not None:
            try:
                self._cell.update({"text/plain": text.plain}, raw=True)
            except Exception as error:  # of the connection to the browser: training goes on
                self._cell = None
                say(f"The progress bar cannot be shown: {error}. Training continues without it.")

    def close(self) -> None:
        """Ends the line and leaves it on the screen."""
        if self._live is not None:
            self._live.stop()

    def _text(self, step: int, figures: Mapping[str, float]) -> Text:
        elapsed, made = time.monotonic() - self._since, step - self._first
        left = elapsed / made * (self._total - step) if made else None
        parts = [
            f"{step:,}/{self._total:,} steps ({step / max(self._total, 1):.0%})",
            f"{_clock(elapsed)} · {_clock(left)} left",
            *([format_figures(figures)] if figures else []),
        ]
        return Text(printable(" · ".join(parts)), no_wrap=True, overflow="ellipsis")


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
      console: The console.
      step: Updates made.
      total: The step at the end.
    """
    in_cell = isinstance(console.file, Dropping) and in_notebook()
    shows = (console.is_terminal or in_cell) and not console.quiet
    return Bar(console, step, total) if shows else None


@contextmanager
def shown(
    total: int, shows: bool, figures: Callable[[], Mapping[str, float]]
) -> Iterator[list[Callable[[int], None]]]:
    """Returns functions that show the progress of a training; none where no bar can be shown.

    The bar appears after the first loop, if that is not the last: short calls show nothing.

    Args:
      total: The step at the end.
      shows: Whether to show a bar at all.
      figures: Returns the figures to show.
    """
    bars: list[Bar] = []

    def show(step: int) -> None:
        if not bars and step < total and (bar := open_bar(open_console(), step, total)):
            bars.append(bar)
        for bar in bars:
            bar.advance(step, figures())

    try:
        yield [show] if shows and (_on_terminal() or in_notebook()) else []
    finally:
        for bar in bars:
            bar.close()


def _on_terminal() -> bool:
    """Returns whether standard output is a terminal."""
    try:
        return bool(dropping(sys.stdout).isatty())
    except ValueError:  # it is closed
        return False


def in_notebook() -> bool:
    """Returns whether this process is the kernel of a notebook."""
    shell = sys.modules.get("IPython")
    return shell is not None and hasattr(shell.get_ipython(), "kernel")


def _clock(seconds: float | None) -> str:
    """Formats a time as '1:30:05', from a day on as '3 days, 12:20:00'."""
    return "-:--:--" if seconds is None else str(datetime.timedelta(seconds=int(seconds)))
