"""Resharding: the layout of parameters over ranks, and transfers from one layout to another.

Independent of `dataflow`, at the same level. Workers use it; controllers only say "update weights
to version v".
"""
