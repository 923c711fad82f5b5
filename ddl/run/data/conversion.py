"""Writing of a config's data into files with random access."""

import importlib.util
from typing import Literal

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from ddl.data.checks import data_errors
from ddl.data.storage.folders import Format, is_described, store
from ddl.errors import ConfigError
from ddl.run.data.of_config import sources_of_config
from ddl.training.results.progress import open_console


def convert_data(
    part: str, folder: str, file_format: Literal["auto"] | Format, shards: int
) -> list[str]:
    """Writes the data of the loaded config, with a progress bar on a terminal.

    Args:
      part: "train" or "eval".
      folder: A new or empty folder.
      file_format: Format of the files; "auto" takes ArrayRecord if its package is installed.
      shards: Number of files.

    Returns:
      Lines that say what was written and how to read it.

    Raises:
      ConfigError: If the config has no such data, several sources, or the folder is not empty.
      DataError: If the data cannot be read or stored.
    """
    sources = sources_of_config(part)
    if len(sources) > 1:
        raise ConfigError(
            f"Trainer.{part}_data has several sources, {', '.join(sources)}. Write one of them: "
            f"bind Trainer.{part}_data to it alone."
        )
    (source,) = sources.values()
    if file_format == "auto":
        has_package = importlib.util.find_spec("array_record") is not None
        file_format = "array_record" if has_package else "tfrecord"
    count = 0 if source.is_endless else len(source)
    console = open_console()
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console, disable=not console.is_terminal)
    with bar, data_errors(source):
        task = bar.add_task("", total=count)
        files = store(
            source,
            folder,
            record_format=file_format,
            shards=shards,
            progress=lambda written: bar.update(task, completed=written),
        )
    reading = (
        f"Trainer.{part}_data = @stored() and stored.folder = {folder!r}"
        if is_described(source)
        else f"bind these files in place of the old ones, such as record_files.files = {files!r}"
    )
    return [f"Wrote {count:,} examples: {', '.join(files)}.", f"To read them: {reading}."]
