"""A reward file for slime's --custom-rm-path."""


async def reward_func(args, sample, **kwargs):
    if sample.status == sample.Status.TRUNCATED:
        return -0.5
    return 1.0 if sample.response.strip() == sample.label else getattr(args, "wrong", 0.0)


async def reward_group(args, samples, **kwargs):
    best = max(sample.response_length for sample in samples)
    return [
        {"score": sample.response_length / best, "length": sample.response_length} for sample in samples
    ]
