"""Everything that happens before a run starts: checks, `weft plan`, `weft doctor` and simulation.

checks.py              checks of a run as a whole; each error names the setting and the fix
dry_run.py             runs a script up to its driver without starting anything
plan.py                the plan of a run; plan_sizes and plan_memory compute its parts
machine.py             findings about this machine: environment, limits, network, disks and memory
machine_packages.py    findings about installed packages and GPUs
simulated.py           the backend without workers; its cost model: simulated_costs, simulated_replica
simulated_bound.py     a lower bound on the time of a step, and costs fitted to a real run
sequence_groups.py     groups of ranks that share the tokens of long rows
"""
