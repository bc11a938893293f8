"""How a run outlives failures: replaced ranks, checkpoints, the lock that keeps a run to one driver, and a disk that is full."""
