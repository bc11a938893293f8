"""Engines that generate responses: vLLM, and `transformers` where there is no vLLM."""
