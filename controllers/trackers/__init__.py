"""Trackers: what a run's metrics are sent to besides its own files (TensorBoard, W&B, MLflow, trackio), each in a process of its own.

tracker.py       the protocol of a tracker, and the kinds that have names
*_tracker.py     one module for each kind; each imports its package only where it is used
new_values.py    reads what was added to the metrics of a run
sent_metrics.py  remembers what was sent, so that a run that goes on sends nothing twice
tracker_process.py     the program of the process: reads the metrics of a run and hands them to one tracker
tracker_processes.py   the driver's side: starts the processes, looks at them, and ends them
"""
