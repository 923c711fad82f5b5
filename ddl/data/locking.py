"""Python objects that several reader threads use one after the other."""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_COLLECTING = threading.Lock()
_holders = 0
_was_enabled = False


@contextmanager
def one_at_a_time(lock: threading.Lock) -> Iterator[None]:
    """Holds a lock within the `with` block, in which no garbage is collected.

    The garbage may hold a TensorFlow iterator, whose end waits for its reader threads. If one of
    them waited for this lock, both would wait forever.

    Args:
      lock: The lock of an object.
    """
    global _holders, _was_enabled
    with lock:
        with _COLLECTING:
            if not _holders:
                _was_enabled = gc.isenabled()
                gc.disable()
            _holders += 1
        try:
            yield
        finally:
            with _COLLECTING:
                _holders -= 1
                if not _holders and _was_enabled:
                    gc.enable()
