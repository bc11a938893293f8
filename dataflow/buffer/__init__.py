"""The sample buffer: the ledger (which row is where, and who holds it), the segments that hold the rows' columns, and the log
that survives a crash.

Pure Python and Arrow. It knows neither Ray nor the workers, so its law can be tested exhaustively in milliseconds.
"""
