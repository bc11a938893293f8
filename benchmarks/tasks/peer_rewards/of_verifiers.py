"""A reward file as users of verifiers 0.1 to 0.3 write it, for a `Rubric`."""


def exact(completion, answer, **kwargs) -> float:
    text = completion if isinstance(completion, str) else completion[-1]["content"]
    return 1.0 if text.strip() == answer else 0.0
