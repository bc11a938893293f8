"""Graders: values that say whether a response is right, as `(response, answer) -> 0 to 1`.

Each is a reward function as it stands: `weft.group(weft.RewardWorker, function=Gsm8k(), tokenizer=...)`.

- `extraction.py` finds the final answer in a response; `numbers.py` reads numbers as people write them.
- `text.py` (exact, F1, regular expression), `gsm8k.py`, `choice.py`, `json_schema.py` and `form.py` (format and length) are pure.
- `math.py` asks a process of its own (`math_process.py`), which runs `math_program.py` and can be killed: `equality.py`.
"""
