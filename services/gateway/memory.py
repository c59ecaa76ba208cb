"""How this process's allocator and collector are set: for many small objects that stay, and for
copies of long prompts that go at once.
"""

from __future__ import annotations

import ctypes
import gc

GC_THRESHOLD = 5000
"""Objects made and kept between walks of the young; Python's own is 700."""
KEPT_BYTES = 32 << 20
"""Freed memory that the allocator keeps instead of giving it back."""
MAPPED_BYTES = 4 << 20
"""Blocks of this size and more are mapped one by one: more than a prompt of a million ids takes."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def settle() -> None:
    """To be called when all is loaded: what is there now stays, and is not walked again.

    Sessions are trees of small objects; with Python's own thresholds the walks are a twelfth of a
    call.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)


def keep_freed_memory() -> bool:
    """Spares the page faults of each copy of a long prompt, which cost many times the copying.

    False where the C library has no such setting (it is glibc's).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES) and mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES))
