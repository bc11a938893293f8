"""Algorithms: advantages, losses, KL estimators and corrections, and the graphs that combine them.

They are pure functions on tensors, and each docstring has the formula and the paper. A new
algorithm is one file.
"""
