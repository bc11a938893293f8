"""The training engine and its parts: models, packing, adapters, updates and checkpoints, on
FSDP2."""
