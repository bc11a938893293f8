"""A reward file as a user of Weft writes it."""


def exact(response: str, answer: str) -> float:
    return float(response.strip() == answer)
