"""Agents: the model acts in harnesses, which talk to it over HTTP, and trains on the tokens it sampled."""
