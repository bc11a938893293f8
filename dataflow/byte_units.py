"""Binary byte units (IEC 80000-13)."""

MIB, GIB = 1 << 20, 1 << 30


def gib(num_bytes: float) -> str:
    """Format a number of bytes in GiB, MiB or KiB.

    >>> gib(1.5 * GIB), gib(300 << 20), gib(3 << 19), gib(200)
    ('1.5 GiB', '300 MiB', '1.5 MiB', '0.2 KiB')
    """
    if num_bytes >= GIB:
        return f"{num_bytes / GIB:,.1f} GiB"
    if num_bytes >= MIB:
        return f"{num_bytes / MIB:.{0 if num_bytes >= 100 * MIB else 1}f} MiB"
    return f"{num_bytes / 1024:.1f} KiB"
