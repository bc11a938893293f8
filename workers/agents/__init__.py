"""Agents: train through any harness, on exactly the tokens that the model sampled."""
