"""Files of fixed names, opened without following links that others may have put there."""

import errno
import os
import stat


def open_itself(path: str | os.PathLike[str], flags: int) -> int:
    """Opens a regular file, and never what a link of this name leads to.

    An `opener` for the built-in `open`. A link that another user planted would otherwise make ddl
    overwrite or extend a file of this user.

    Raises:
      OSError: If it cannot be opened, or is a symbolic link, a pipe or a device.
    """
    try:
        # Without O_NONBLOCK, opening a pipe that nobody reads would wait forever.
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(error.errno, "it is a symbolic link; ddl needs the file itself") from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file")
    return descriptor


def unwritable(path: str | os.PathLike[str], error: OSError) -> str:
    """Returns the message for a file that cannot be written, with the remedy."""
    is_planted = error.errno in (errno.ELOOP, errno.EINVAL, errno.ENXIO)
    remedy = "Remove it." if is_planted else "Check the free disk space and the permissions."
    return f"{os.fspath(path)} cannot be written: {error.strerror}. {remedy}"
