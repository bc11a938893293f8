"""Workers: actor, critic, reference, reward and rollout, one SPMD process each, and their engines.

A worker is a plain typed class that a unit test can construct. Ray wraps it at the edge, in
`controllers`.
"""
