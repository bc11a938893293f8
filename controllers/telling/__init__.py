"""The output of a run for people, while it goes on.

progress.py      what the run calls: decides what is shown, and when
records.py       what is shown: a step, an evaluation, the end
sample.py        what is shown of a sample
displays.py      how: plain lines, JSON lines, or nothing
terminal.py      how, on a terminal: colours, columns and frames
readable.py      text of a model or of data, made harmless for a terminal
"""
