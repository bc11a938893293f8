"""The sample buffer: a ledger of all rows, segments that store their columns, and a log for crash
recovery.

The buffer is pure Python and Arrow, without Ray or workers. Tests can therefore check its rules
exhaustively in milliseconds.
"""
