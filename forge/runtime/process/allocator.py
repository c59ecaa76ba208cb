"""Memory of a process: two settings of glibc's allocator, and Python's garbage collector.

By default glibc returns free memory at the end of a heap to the kernel at once, and the next
allocation faults it in again, page by page. This took a sixth of the cycles of a pool that appends
turns, a third of a pool that serves reads, and many times the copy of a long prompt.
"""

from __future__ import annotations

import ctypes
import gc

GC_THRESHOLD = 5000
"""New objects before a collection of the youngest generation; Python's default is 700."""
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_MMAP_THRESHOLD_BYTES = 32 << 20
"""Highest value of glibc; by default each buffer of 128 KiB gets its own mapping."""


def keep_freed_memory(limit_bytes: int, *, mapped_bytes: int = _MMAP_THRESHOLD_BYTES) -> bool:
    """Let each heap keep up to `limit_bytes` of free memory.

    Blocks of `mapped_bytes` and more get their own mapping. Returns False, without effect, on
    another C library than glibc.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(
        mallopt(_M_TRIM_THRESHOLD, limit_bytes) and mallopt(_M_MMAP_THRESHOLD, mapped_bytes)
    )


def settle() -> None:
    """Call after all imports: exempts the present objects from collection and collects less often.

    Sessions are trees of small objects; with Python's own thresholds the collector took a twelfth
    of a call of the gateway, and a seventh of a decode step of 256 sequences of a small model.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
