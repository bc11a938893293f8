"""Workers: actor, critic, reference, reward and rollout, and their engines. Each worker is one SPMD
process.

A worker is a plain typed class, which a unit test can construct. `controllers` wraps it with Ray.
"""
