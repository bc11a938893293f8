"""The sample buffer: a ledger of all rows, segments with their columns, and a log for crash
recovery.

It is pure Python and Arrow, without Ray or workers, so that tests can check its rules exhaustively
in milliseconds.
"""
