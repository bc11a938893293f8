"""What flows: columns, batches, the graph that says who reads and writes them, and the sample buffer.

The ground floor. It knows nothing of models, worker groups or Ray, so its rules can be tested in milliseconds.
"""
