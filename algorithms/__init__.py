"""Algorithms: advantages, losses, KL estimators and corrections, and the graphs that combine them.

Pure functions on tensors, each with its formula and paper in the docstring. A new algorithm is one
file.
"""
