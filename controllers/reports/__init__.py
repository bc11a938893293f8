"""Reports to the user during a run: progress, symptoms and trackers.

progress.py            decides what to show, and when
records.py             the records it shows: a step, an evaluation, the end of a run
displays.py            chooses how to show them
lines.py               how to show them as plain lines or JSON lines
terminal.py            how to show them in a terminal
sample.py              one sample as a person reads it
symptoms.py            signs that a run cannot learn, each with advice
trackers.py            TensorBoard, W&B, MLflow, trackio
tracker_threads.py     sends metrics to each tracker on its own thread
dashboard_process.py   the dashboard that a run starts
"""
