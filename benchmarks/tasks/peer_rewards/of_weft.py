"""A reward file as users of Weft write it."""


def exact(response: str, answer: str) -> float:
    return float(response.strip() == answer)
