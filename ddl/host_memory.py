"""Memory of the host: what a step lets go of, the next one takes again."""

import ctypes
import os
import sys

# glibc's numbers for mallopt; a threshold above 32 MiB it refuses.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MMAP_THRESHOLD = 32 << 20
_NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Has the C library keep freed memory for the process, where it would give it back at once.

    TensorFlow takes the tensors of a step on CPU from malloc. glibc gives large blocks back to the
    system when they are freed, and the next step gets pages that the kernel has to clear and map
    again (`python -m benchmarks.host_memory` measures what that takes). Blocks above 32 MiB go that
    way still.

    Does nothing where the C library is another, or where the environment sets it (MALLOC_…_).

    Returns:
      Whether it was done.
    """
    if sys.platform != "linux" or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD)) and bool(
        mallopt(_M_TRIM_THRESHOLD, _NEVER)
    )
