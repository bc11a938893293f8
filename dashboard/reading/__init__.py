"""reading: what run directories say, as plain records. No web in it; everything is read again only where a file has changed.

catalogue.py          the runs below a folder, by name
run_reader.py         one run: its parts, each read once and followed while the run goes on
run_facts.py          status, step, last metrics, alerts, damage
metrics.py            the metrics of a run, as arrays that grow
curves.py             metrics over an axis, thinned for a screen, and marks
"""
