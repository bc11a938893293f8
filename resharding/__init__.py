"""Resharding: the layout of parameters over ranks, and transfers from one layout to another.

Of `dataflow` it imports only errors and lazy torch. Workers use it; controllers only say "update
weights to version v".
"""
