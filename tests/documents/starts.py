"""Programs of the documents as processes."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.documents.pages import ROOT
from tests.processes import forked


def start(arguments: Sequence[str], folder: Path) -> str:
    """Runs Python with arguments to a good end, and returns what it prints."""
    result = forked.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, f"{result.stdout[-1500:]}\n{result.stderr[-1500:]}"
    return result.stdout
