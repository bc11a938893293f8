"""Signatures: unmodified reward files of five libraries' users (`peer_rewards/`).

python benchmarks/tasks/signatures.py
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import tokenizers

from weft.dataflow.batch import Batch
from weft.workers.reward import RewardConfig, RewardWorker

FILES = Path(__file__).resolve().parent / "peer_rewards"
WORDS = ("<end>", "one", "two", "three", "ask")
FUNCTIONS: Mapping[str, tuple[str, str, list[float]]] = {
    "Weft": ("of_weft", "exact", [1.0, 0.0, 1.0]),
    "TRL": ("of_trl", "accuracy_reward", [1.0, 0.0, 1.0]),
    "verl": ("of_verl", "compute_score", [1.0, -1.0, 1.0]),
    "OpenRLHF": ("of_openrlhf", "reward_func", [1.0, 0.0, 1.0]),
    "slime": ("of_slime", "reward_func", [1.0, 0.0, -0.5]),
}
"""Maps a library to file, function, and rewards of a correct, an incorrect, and a truncated correct
sample."""


def load(name: str) -> ModuleType:
    """Import a user's file from its path, as the libraries do."""
    spec = importlib.util.spec_from_file_location(f"peer_{name}", FILES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def samples() -> Batch:
    """Return three samples with the columns of verl's data and of Weft."""
    rows: list[dict[str, Any]] = [
        {"response_ids": [1, 2, 0], "answer": "one two", "finish_reason": "stop"},
        {"response_ids": [3], "answer": "two", "finish_reason": "stop"},
        {"response_ids": [2], "answer": "two", "finish_reason": "length"},
    ]
    same = {"group_id": 1, "prompt": "ask", "prompt_ids": [4], "data_source": "words"}
    return Batch.from_rows(
        [{**same, **row, "sample_id": k, "extra_info": {"index": k}} for k, row in enumerate(rows)]
    )


def mistake(library: str, folder: Path) -> str:
    """Describe the mistake in a library's rewards; empty if there is none."""
    file, name, expected = FUNCTIONS[library]
    config = RewardConfig(function=getattr(load(file), name), tokenizer=folder)
    found = config.rewards[0].signature
    if (found.library if found else "Weft") != library:
        return f"it is taken for {found}"
    worker = RewardWorker(config)
    try:
        given = {
            i: r
            for rows, _ in worker.score(samples())
            for i, r in zip(*map(rows.numpy, ("sample_id", "reward")), strict=True)
        }
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        worker.close()
    got = [float(given[k]) for k in range(len(expected))]
    return "" if got == expected else f"{got}, not {expected}"


def signatures() -> tuple[int, int]:
    """Return the number of libraries whose reward functions give the expected rewards, and of
    all."""
    right = 0
    with tempfile.TemporaryDirectory() as folder:
        words = tokenizers.models.WordLevel(
            {word: k for k, word in enumerate(WORDS)}, unk_token=WORDS[0]
        )
        tokenizer = tokenizers.Tokenizer(words)
        tokenizer.add_special_tokens([WORDS[0]])
        tokenizer.save(str(Path(folder) / "tokenizer.json"))
        for library in FUNCTIONS:
            wrong = mistake(library, Path(folder))
            right += not wrong
            if wrong:
                print(f"{library}: {wrong}", file=sys.stderr)
    return right, len(FUNCTIONS)


if __name__ == "__main__":
    done, number = signatures()
    print(json.dumps({"signatures": f"{done}/{number}"}))
