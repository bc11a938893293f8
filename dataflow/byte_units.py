"""Byte units, by IEC 80000-13."""

MIB, GIB = 1 << 20, 1 << 30


def gib(num_bytes: float) -> str:
    """Format a number of bytes.

    >>> gib(1.5 * GIB), gib(3 << 20)
    ('1.5 GiB', '3 MiB')
    """
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB / 2 else f"{num_bytes / MIB:.0f} MiB"
