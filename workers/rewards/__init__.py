"""Reward functions: recognise their library by their signature, call them, and interpret their
results.

`signature.py` recognises libraries; `function.py` has a function with its name and weight;
`calls.py` runs asynchronous calls; `judge.py` asks a model behind an OpenAI-compatible API.
`workers/reward.py` combines them.
"""
