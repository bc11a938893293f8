"""Byte units, by IEC 80000-13."""

MIB, GIB = 1 << 20, 1 << 30
