"""Engines that generate responses: vLLM, and `transformers` for machines without vLLM."""
