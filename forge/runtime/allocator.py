"""What the C allocator does with memory that was freed.

Owns two settings of glibc. It gives memory at the end of a heap back to the kernel at once, and
what is allocated next is faulted in anew, page by page: a sixth of the cycles of a pool that takes
turns, a third of those of one that is read.
"""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_MMAP_THRESHOLD_BYTES = 32 << 20
"""The highest that glibc takes; without it each buffer of 128 KiB has a mapping of its own."""


def keep_freed_memory(limit_bytes: int) -> bool:
    """Lets each heap keep up to `limit_bytes` that are free, for this process's life.

    False where the C library is not glibc: then nothing changes.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    taken = mallopt(_M_TRIM_THRESHOLD, limit_bytes) and mallopt(
        _M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES
    )
    return bool(taken)
