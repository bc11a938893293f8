"""Graders: callables `(response, answer) -> 0 to 1`.

Each grader is a reward function: `weft.group(weft.RewardWorker, function=Gsm8k(), tokenizer=...)`.

- `extraction.py` finds the final answer in a response; `numbers.py` parses numbers in common
  notations.
- `text.py` (exact, F1, regular expression, format, length, JSON schema) and `choice.py` are pure
  functions.
- `math.py` compares formulas (`equality.py`) in a separate process (`math_program.py`).
"""
