"""Graders: values that grade a response, as `(response, answer) -> 0 to 1`.

Each is a reward function: `weft.group(weft.RewardWorker, function=Gsm8k(), tokenizer=...)`.

- `extraction.py` finds the final answer in a response; `numbers.py` parses numbers in common notations.
- `text.py` (exact, F1, regular expression, format, length, JSON schema) and `choice.py` are pure.
- `math.py` compares formulas in a separate process, which runs `math_program.py` and can be killed: `equality.py`.
"""
