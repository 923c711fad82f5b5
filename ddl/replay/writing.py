"""The file of a replay's values. Imports no TensorFlow."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ddl.errors import ConfigError
from ddl.replay.recorded import Recorded
from ddl.replay.values import arrays_of


def write_arrays(file: Path, recorded: Recorded, step: int, shown: Sequence[str]) -> None:
    """Writes what is asked for as a .npz file; see `ddl.replay.values.arrays_of`.

    Raises:
      ConfigError: If the file cannot be written.
    """
    # NumPy would take a slash in a name for a folder when the archive is unpacked.
    arrays = {
        name.replace("/", "."): array for name, array in arrays_of(recorded, step, shown).items()
    }
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("wb") as opened:
            np.savez(opened, **arrays)  # type: ignore[arg-type]
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be written: {error.strerror}. Pass another --output."
        ) from error
