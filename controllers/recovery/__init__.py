"""How a run outlives failures: replaced ranks, checkpoints, resuming, ending early, and a full disk."""
