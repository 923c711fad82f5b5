"""The search for a checkpoint that can be read."""

from collections.abc import Callable

from ddl.checkpoints.directory import (
    CheckpointDamagedError,
    CheckpointDirectory,
    SavedCheckpoint,
)
from ddl.errors import ModelDirectoryError


def newest_readable(
    directory: CheckpointDirectory, scheduled: bool = False
) -> tuple[SavedCheckpoint | None, list[tuple[SavedCheckpoint, CheckpointDamagedError]]]:
    """Returns the newest readable checkpoint, if any, and the newer, damaged ones.

    Args:
      directory: The directory of the checkpoints.
      scheduled: Whether to skip checkpoints that were saved on a signal.

    Raises:
      ModelDirectoryError: If there are checkpoints and all are damaged.
    """
    damaged = []
    for saved in reversed(directory.saved()):
        if scheduled and not saved.metadata.scheduled:
            continue
        try:
            directory.check(saved)
        except CheckpointDamagedError as error:
            if saved.step not in [each.step for each in directory.saved()]:
                # The run has just removed this checkpoint, and has written newer ones.
                return newest_readable(directory, scheduled)
            damaged.append((saved, error))
        else:
            return saved, damaged
    if damaged:
        listing = "\n".join(f"  {saved}: {error}" for saved, error in damaged)
        raise ModelDirectoryError(
            f"No checkpoint in {directory.path} can be read:\n{listing}\n"
            "Restore one from a backup, or start a new run in another --model_dir."
        )
    return None, []


def newest_undamaged(
    directory: CheckpointDirectory, scheduled: bool, report: Callable[[str], None]
) -> SavedCheckpoint | None:
    """Returns the newest readable checkpoint, if any; moves the newer, damaged ones.

    Args:
      directory: The directory of the checkpoints.
      scheduled: Whether to skip checkpoints that were saved on a signal.
      report: Called with a message for each damaged one.

    Raises:
      ModelDirectoryError: As `newest_readable`, or if a damaged one cannot be moved.
    """
    saved, damaged = newest_readable(directory, scheduled)
    for each, error in damaged:
        where = directory.set_aside(each)
        report(f"{each} is damaged ({error}) and was moved to {where}.")
    return saved


def checked_or_newest(
    directory: CheckpointDirectory, saved: SavedCheckpoint | None, report: Callable[[str], None]
) -> SavedCheckpoint | None:
    """Checks and returns the given checkpoint; for None, finds the newest readable one.

    Reports the newer, damaged ones, and changes nothing in the folder.

    Raises:
      ModelDirectoryError: If the given checkpoint, or every checkpoint, is damaged.
    """
    if saved is None:
        saved, damaged = newest_readable(directory)
        for each, error in damaged:
            report(f"{each} is damaged ({error}); the checkpoint before it is used.")
        return saved
    try:
        directory.check(saved)
    except CheckpointDamagedError as error:
        raise ModelDirectoryError(
            f"{saved} cannot be read: {error}. Pass another --checkpoint."
        ) from error
    return saved
