"""Dataflow: columns, batches, graphs of nodes that read and write columns, and the sample buffer.

The lowest layer. It does not know models, worker groups or Ray.
"""
