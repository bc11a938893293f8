"""Freed memory of a process stays with it."""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
"""Parameters of glibc's `mallopt` (malloc.h)."""


def keep_freed_memory() -> None:
    """Let the C library keep memory that is freed for what is allocated next; by default glibc gives tensors of more than 32 MiB back to
    the kernel, which clears each page before it hands it out again. The heap may fragment: 1 % more memory was measured.

    The setting holds for the whole process, which under `Local()` is the user's. Other C libraries, and other systems, go on as they do.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_MMAP_MAX, 0)
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)
