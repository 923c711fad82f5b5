"""Filter for TensorFlow's start-up messages.

TF_CPP_MIN_LOG_LEVEL silences most of them. TensorFlow's libraries ignore this setting while they
are being loaded and log directly to the file descriptor of standard error
(https://github.com/abseil/abseil-cpp/pull/1957). ddl captures this descriptor for the few seconds
of start-up, drops the known messages and passes on every other line.
"""

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator

# Information and warnings in the format of absl's C++ logger.
_CHATTER = re.compile(
    rb"^(?:[IW]\d{4} \d\d:\d\d:|[IW]0000 00:00:"
    rb"|WARNING: All log messages before absl::InitializeLog"
    rb"|To enable the following instructions: )"
)
# Without an NVIDIA device this error only says that there is none.
_NO_GPU = re.compile(rb"failed call to cuInit|CUDA_ERROR_NO_DEVICE")
_NVIDIA_DEVICES = ("/dev/nvidiactl", "/dev/dxg")


@contextlib.contextmanager
def quiet_start_up() -> Iterator[None]:
    """Drops TensorFlow's information and warnings within the `with` block.

    All other output is passed on when the block ends, also when it raises. Does nothing if
    TF_CPP_MIN_LOG_LEVEL asks for information (0) or warnings (1).
    """
    if os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2") in ("0", "1"):
        yield
        return
    sys.stderr.flush()
    original = os.dup(2)
    with tempfile.TemporaryFile() as caught:
        os.dup2(caught.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(original, 2)
            os.close(original)
            caught.seek(0)
            os.write(2, b"".join(line for line in caught if not _is_chatter(line)))


def _is_chatter(line: bytes) -> bool:
    if _CHATTER.match(line):
        return True
    has_gpu = any(os.path.exists(device) for device in _NVIDIA_DEVICES)
    return not has_gpu and _NO_GPU.search(line) is not None
