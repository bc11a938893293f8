"""A run on disk, `runs/NAME/`, as every layer reads it.

files.py             names of files and folders, and the durable file operations
directory.py         RunDirectory: creates and opens a run
lock.py              one writer per run
log.py               the write-ahead log; log_archive.py has the parts that were cut off
requests.py          requests to a driver: stop, stacks
alerts.py            messages for the user
tables.py            metrics and timeline, as tables that grow
follow.py            reads what was added to a run since the last look
samples.py           recorded samples
facts.py             the state of a run: live, ended, killed, damaged or empty
manifest.py          sizes and checksums of a folder
"""
