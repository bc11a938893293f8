"""The planner: what a run will need, computed before anything starts.

plan.py         the run as a whole, beside what this machine has
sizes.py        a step in prompts, rows, tokens, microbatches and optimizer steps; bytes of its samples
memory.py       what each rank holds in each phase
stages.py       what each stage of a pipeline holds, and how long it is idle
sequences.py    groups of ranks for rows of uneven lengths
resident.py     what a process takes before it holds a tensor: measured constants
step_time.py    the time of a step, where costs are known
expected.py     what common models take on common GPUs: the tables of docs/gpu.md

The arithmetic of a trained model is in `workers/training/memory.py`, and what a pass takes is found by `workers/training/activations.py`,
both beside what they describe.
"""
