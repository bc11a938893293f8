"""The training engine and its parts: models, packing, adapters, updates, checkpoints."""
