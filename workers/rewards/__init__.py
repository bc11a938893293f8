"""Reward functions as people have them: which library's signature one has, how it is called, and what its result means.

`signature.py` tells the libraries apart; `function.py` is a function with its name and weight; `calls.py` has many asynchronous calls
in flight; `judge.py` asks a model at an OpenAI-compatible address. `workers/reward.py` puts them together.
"""
