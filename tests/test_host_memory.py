import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="the C library is not glibc"
)

# Pages that the kernel hands out while a block of 16 MiB is taken and given back 20 times.
PAGES = """
import ctypes
import resource
from ddl.host_memory import keep_freed_memory

library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p

def use(times):
    for _ in range(times):
        block = ctypes.c_void_p(library.malloc(16 << 20))
        library.memset(block, 1, 16 << 20)
        library.free(block)

print(keep_freed_memory())
use(2)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
use(20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def kept_and_pages(**environment):
    done = subprocess.run(
        [sys.executable, "-c", PAGES], capture_output=True, text=True, check=True, env=environment
    )
    kept, pages = done.stdout.split()
    return kept == "True", int(pages)


def test_freed_memory_is_taken_again():
    kept, pages = kept_and_pages()
    assert kept
    assert pages < 200


def test_what_the_environment_sets_stays():
    kept, pages = kept_and_pages(MALLOC_MMAP_THRESHOLD_="131072")
    assert not kept
    assert pages > 20 * 100
