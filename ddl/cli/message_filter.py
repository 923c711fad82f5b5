"""Filter that copies standard input to standard output without TensorFlow's start-up messages.

`ddl.cli.tensorflow_messages` runs this file as a process of its own, which outlives a process that
aborts and passes on its last lines. The file imports nothing of ddl and no package, so it starts
in 20 ms.
"""

import os
import re
import sys

END = b"\0end of the start-up\0"
"""Written by the filtered process when the filter has to pass on everything that follows."""

# Information and warnings in the format of absl's C++ logger.
_CHATTER = re.compile(
    rb"^(?:[IW]\d{4} \d\d:\d\d:|[IW]0000 00:00:"
    rb"|WARNING: All log messages before absl::InitializeLog"
    rb"|To enable the following instructions: )"
)
# Without an NVIDIA device this error only says that there is none.
_NO_GPU = re.compile(rb"failed call to cuInit|CUDA_ERROR_NO_DEVICE")
_NVIDIA_DEVICES = ("/dev/nvidiactl", "/dev/dxg")


def copy(done: int) -> None:
    """Copies standard input, filtered up to `END`, until all its writers have closed it.

    Args:
      done: Descriptor that is closed when everything before `END` is written.
    """
    unfinished, end = b"", b""
    while not end and (received := os.read(0, 1 << 16)):
        filtered, end, rest = (unfinished + received).partition(END)
        whole = len(filtered) if end else filtered.rfind(b"\n") + 1
        _write(_without_chatter(filtered[:whole]))
        unfinished = rest if end else filtered[whole:]
    _write(unfinished)
    os.close(done)
    while received := os.read(0, 1 << 16):  # of processes that inherited the stream
        _write(received)


def _without_chatter(text: bytes) -> bytes:
    return b"".join(line for line in text.splitlines(keepends=True) if not _is_chatter(line))


def _is_chatter(line: bytes) -> bool:
    if _CHATTER.match(line):
        return True
    has_gpu = any(os.path.exists(device) for device in _NVIDIA_DEVICES)
    return not has_gpu and _NO_GPU.search(line) is not None


def _write(content: bytes) -> None:
    try:
        while content:
            content = content[os.write(1, content) :]
    except OSError:  # a full disk, or a reader that ended, must not stop the filtered process
        pass


if __name__ == "__main__":
    copy(int(sys.argv[1]))
