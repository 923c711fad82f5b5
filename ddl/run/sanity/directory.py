"""Directories of the sanity modes, which no real run uses."""

import os
import shutil

from ddl.checkpoints.durable_files import write_atomically
from ddl.choices import SanityMode
from ddl.errors import ModelDirectoryError
from ddl.files import unwritable
from ddl.run.directory import MARK, RunDirectory

_TEXT = """{mode}

--{mode} wrote this directory. Its files belong to no real run: ddl does not resume, evaluate or
export them, and the next --{mode} replaces them. You may remove the directory.
"""


class SanityDirectory(RunDirectory):
    """The directory of a sanity mode: that of the real run with the mode at its end.

    A file marks it, so that no real run resumes from it.
    """

    def __init__(self, model_dir: str, mode: SanityMode):
        """Checks that the directory is marked as the mode's, empty or missing. Changes nothing.

        Args:
          model_dir: Directory of the real run, or that of the mode itself.
          mode: The mode.

        Raises:
          ModelDirectoryError: If it holds other files, or as `RunDirectory`.
        """
        self._mode = mode
        given = model_dir.rstrip("/")
        if os.path.basename(given) in ("", ".", ".."):
            given = os.path.abspath(model_dir)
        super().__init__(given if given.endswith(f"-{mode}") else f"{given}-{mode}")

    def _check_mark(self) -> None:
        """Raises ModelDirectoryError unless the directory is this mode's to write."""
        marked = self._marked_by()
        if marked == self._mode or not self.path.exists():
            return
        if marked is not None or any(self.path.iterdir()):
            raise ModelDirectoryError(
                f"{self.path} must be a directory that --{self._mode} wrote, or be empty, but it "
                f"holds {'files of --' + marked if marked else 'other files'}. Move them away, or "
                "pass another --model_dir."
            )

    def begin(self) -> None:
        """Creates, locks and marks the directory, and removes what an earlier call of ddl wrote.

        Raises:
          ModelDirectoryError: If the directory cannot be written.
          NotReady: If another process trains there.
        """
        self.open()
        with self._reaching():
            self._check_mark()  # another process may have written since the start
        try:
            write_atomically(self.path / MARK, _TEXT.format(mode=self._mode))
            for path in (self.checkpoints, self.export, self.path / "train", self.path / "eval"):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
            for path in (self.metrics, self.config, self.operative_config):
                path.unlink(missing_ok=True)
        except OSError as error:
            raise ModelDirectoryError(unwritable(self.path, error)) from error
