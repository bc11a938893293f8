"""Checks before a run starts, `weft plan` and `weft doctor`.

checks.py    checks of a run as a whole; each error names the setting and the fix
             (whether a placement fits the cluster: `lay_out` in ../node_layout.py)
dry_run.py   runs a script up to its driver without starting anything
plan.py      the plan of a run; plan_sizes and plan_memory compute its parts
machine.py   findings about this machine and its packages
"""
