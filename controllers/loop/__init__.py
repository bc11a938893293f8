"""The parts of a run's loop: admit, dispatch, settle, close. `run.py`, one folder up, puts them together."""
