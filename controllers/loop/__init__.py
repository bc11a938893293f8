"""The loop of a run (`run.py`) and its parts: admit, dispatch, settle, close."""
