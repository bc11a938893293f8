"""Simulated runs: the graph, driver and schedule of a real run, with costs instead of workers.

backend.py           the backend without workers, on a virtual clock
replica.py           the calls of one replica: a continuous batch in virtual time
costs.py             the time of each call, costs fitted to a real run, and a bound on a step's time
sequence_groups.py   groups of ranks that share the tokens of long rows
"""
