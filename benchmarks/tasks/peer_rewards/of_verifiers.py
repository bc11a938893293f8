"""A reward file as a user of verifiers, and so of prime-rl, writes it."""


def exact(completion, answer, **kwargs) -> float:
    text = completion if isinstance(completion, str) else completion[-1]["content"]
    return 1.0 if text.strip() == answer else 0.0
