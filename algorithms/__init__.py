"""What to optimise: advantages, losses, KL estimators and corrections, and the graphs made of them.

Pure functions on tensors, each with its formula and paper in the docstring. A new algorithm is one file.
"""
