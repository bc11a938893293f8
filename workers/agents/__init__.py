"""Agents: harnesses talk HTTP to a gateway, and rows keep the exact tokens that the model sampled."""
