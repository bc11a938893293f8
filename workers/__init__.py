"""Workers: actor, critic, reference, reward and rollout, and their engines.

A worker is a plain typed class, which unit tests can construct. `controllers` wraps it with Ray.
Each worker is one SPMD process.
"""
