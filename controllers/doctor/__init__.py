"""doctor: what is wrong with a machine; `weft doctor`.

inspection/ looks at it: it starts nothing and imports nothing heavy; each finding is ok, warn or fail.
trials/ tries what Weft does on it, each trial in a process of its own; each has passed, failed or been skipped.
"""
