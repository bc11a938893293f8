"""Resharding: how parameters are laid out over ranks, and transfers from one layout to another.

It depends on `dataflow` only for errors and the lazy import of torch. Workers use it. Controllers
only ask for "update weights to version v".
"""
