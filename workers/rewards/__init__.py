"""Reward functions: recognise their library, call them, and interpret their results.

`signature.py` recognises libraries, `function.py` has a function with its name and weight,
`calls.py` runs asynchronous calls, `judge.py` asks a model behind an OpenAI-compatible API, and
`workers/reward.py` combines them.
"""
