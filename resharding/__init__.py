"""Resharding: layouts of parameters over ranks, and transfers from one layout to another.

It depends on `dataflow` only for errors and the lazy import of torch. Workers use it.
"""
