"""Algorithms: advantages, losses, KL estimators and corrections, and the graphs that combine them.

Each docstring has the formula and the paper.
"""
