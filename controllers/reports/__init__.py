"""Reports of a run: progress, symptoms and trackers.

progress.py            decides what to show, and when
step_line.py           contents: the columns of a step, an evaluation, the end of a run
sample.py              formats one sample for people
displays.py            shows contents as plain lines or JSON lines
terminal.py            shows contents in a terminal
symptoms.py            signs that a run cannot learn, each with advice
trackers.py            TensorBoard, W&B, MLflow, trackio
tracker_threads.py     sends metrics to each tracker on its own thread
dashboard_process.py   the dashboard that a run starts
"""
