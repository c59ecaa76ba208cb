"""How a process holds memory: what its C allocator keeps, and what its collector walks.

Owns two settings of glibc and those of Python's collector. glibc gives memory at the end of a heap
back to the kernel at once, and what is allocated next is faulted in anew, page by page: a sixth of
the cycles of a pool that takes turns, a third of those of one that is read, and many times the
copying of a long prompt.
"""

from __future__ import annotations

import ctypes
import gc

GC_THRESHOLD = 5000
"""Objects made and kept between walks of the young; Python's own is 700."""
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_MMAP_THRESHOLD_BYTES = 32 << 20
"""The highest that glibc takes; without it each buffer of 128 KiB has a mapping of its own."""


def keep_freed_memory(limit_bytes: int, *, mapped_bytes: int = _MMAP_THRESHOLD_BYTES) -> bool:
    """Lets each heap keep up to `limit_bytes` that are free, for this process's life.

    Blocks of `mapped_bytes` and more are mapped one by one. False where the C library is not
    glibc: then nothing changes.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(
        mallopt(_M_TRIM_THRESHOLD, limit_bytes) and mallopt(_M_MMAP_THRESHOLD, mapped_bytes)
    )


def settle() -> None:
    """To be called when all is loaded: what is there now stays, and is not walked again.

    Sessions are trees of small objects; with Python's own thresholds the walks are a twelfth of a
    call.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
