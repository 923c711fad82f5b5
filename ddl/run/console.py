"""Console output of a run: a summary, a progress bar on a terminal, lines elsewhere."""

from collections.abc import Mapping

from rich.console import Console
from rich.text import Text

from ddl.output import printable
from ddl.training.progress import Bar, format_figures, open_bar, open_console


class RunConsole:
    """The console of a run: a line per log, and a progress bar on a terminal or in a notebook.

    Output that fails never ends a run (`ddl.output`), and a name is never read as markup or as a
    control sequence of the terminal.
    """

    def __init__(self, console: Console | None = None, shows: bool = True):
        """Opens the console.

        Args:
          console: Console to print on; None makes one on standard output.
          shows: Whether the console on standard output prints anything.
        """
        self._console = console or open_console(shows)
        self._bar: Bar | None = None

    def summary(self, rows: Mapping[str, str]) -> None:
        """Prints names and texts as lines."""
        for name, text in rows.items():
            self.line(f"{name}: {text}")

    def line(self, text: str) -> None:
        """Prints a text, above the progress bar if there is one.

        On a terminal it is wrapped between words; elsewhere each line stays whole.
        """
        self._console.print(Text(printable(text)), soft_wrap=not self._console.is_terminal)

    def start(self, step: int, total: int) -> None:
        """Shows the progress bar from `step` to `total`, on a terminal or in a notebook."""
        self._bar = open_bar(self._console, step, total)

    @property
    def shows_progress(self) -> bool:
        """Whether a progress bar is shown."""
        return self._bar is not None

    def advance(self, step: int, figures: Mapping[str, float]) -> None:
        """Updates the progress bar, if there is one."""
        if self._bar is not None:
            self._bar.advance(step, figures)

    def write(self, step: int, epoch: float, split: str, values: Mapping[str, float]) -> None:
        """Prints metrics as a line; see `writers.Writer`."""
        self.line(f"step {step:,} · epoch {epoch:.2f} · {split} · {format_figures(values)}")

    def close(self) -> None:
        """Stops the progress bar and leaves it on the screen."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
