"""How a node that runs for long holds its memory.

Chunks of a megabyte come and go hundreds of times a second. By default the allocator of glibc gives such
blocks back to the system each time, and the garbage collector looks through all that was imported again and
again: together a fifth of the CPU of a download.
"""

from __future__ import annotations

import ctypes
import gc
import sys

KEPT_BYTES = 16 * 1024 * 1024
"""Freed memory that the process keeps at hand for each of its arenas; blocks from this size on are given back
at once."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of malloc.h


def settle() -> None:
    """To be called once, when all is imported: what is here then stays, and freed memory is kept for the next
    chunk where the allocator is glibc's."""
    gc.collect()
    gc.freeze()
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(_TRIM_THRESHOLD, KEPT_BYTES)
            mallopt(_MMAP_THRESHOLD, KEPT_BYTES)
