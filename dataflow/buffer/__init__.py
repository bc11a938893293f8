"""The sample buffer: a ledger of all rows, segments that store their columns, and a log for crash
recovery.

The buffer uses neither Ray nor workers, so that tests can check its rules in milliseconds.
"""
