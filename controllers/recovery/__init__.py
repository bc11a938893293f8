"""Recovery from failures: rank replacement, checkpoints, resuming, ending early, and full disks."""
