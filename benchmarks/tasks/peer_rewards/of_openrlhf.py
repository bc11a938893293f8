"""A reward file for OpenRLHF's --reward.remote_url."""

import torch


def reward_func(queries, prompts, labels, **kwargs):
    rewards = []
    for query, prompt, label in zip(queries, prompts, labels, strict=True):
        rewards.append(1.0 if query[len(prompt) :].strip() == label else 0.0)
    tensor = torch.tensor(rewards)
    return {"rewards": tensor, "scores": tensor, "extra_logs": {"math_accuracy": tensor.mean()}}
