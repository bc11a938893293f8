"""The planner: what a run will need, computed before anything starts.

plan.py      the run as a whole: sizes of a step, groups, bytes on the disk
memory.py    what each rank holds in each phase

The arithmetic of a trained model is in `workers/training/memory.py`, beside what it describes.
"""
