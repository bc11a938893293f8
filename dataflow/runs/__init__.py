"""Reads and writes the directory of a run, `runs/NAME/`. All layers use this package.

files.py             names of files and folders, and durable file operations
directory.py         RunDirectory: creates and opens a run
lock.py              ensures that a run has one writer
log.py               the write-ahead log
log_archive.py       compressed earlier parts of the log
requests.py          requests to a driver: to stop, or to report stacks
alerts.py            messages for the user
tables.py            metrics and timeline, as tables that grow
follow.py            reads the data added to a run since the last read
samples.py           recorded samples
facts.py             the state of a run: running, ended, killed, damaged or empty
manifest.py          sizes and checksums of the files in a folder
"""
