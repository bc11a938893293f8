"""An agent learns to play Hangman, a game of TextArena, from a task set of verifiers.

python -m venv .venv-verifiers
.venv-verifiers/bin/pip install "verifiers[ta]>=0.4" uv

python examples/agent_verifiers.py                  with Ray and vLLM
python examples/agent_verifiers.py --backend local  in one process without Ray and vLLM, so that breakpoints work

The task set `textarena` is the real one, unmodified. It draws its words from NLTK's list of words,
which it would download. This program writes a short list instead, so nothing is downloaded. Its
words use only ten letters.

After the warm start, the model guesses any letter, again and again. It learns which letters there are,
and not to repeat one.
"""

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import tiny_agents

import weft
from weft.algorithms.evaluation import evaluate
from weft.algorithms.grpo import grpo
from weft.dataflow.errors import UserError
from weft.dataflow.runs.directory import require_folder
from weft.workers.agents.harness import Verifiers

TASKS, HELD_OUT, DEMONSTRATIONS, WARM_STEPS = 400, 60, 2000, 80
MOST_TURNS = 16
MISSES = 6
"""Number of wrong letters that ends a game."""
WORDS = """
adore adorn aisle alert alien alone arise arson aside asset atlas dealer dealt denial dental detail
deter diner dollar donate doors drain earn east eastern editor entire ideal idle inlet inside instead
iron island land lane last lead learn least lend lesson linen lines lion list listen load loaders loan
lords lost nail national nest noise nose notes oral ordeal orders orient radio rail rain raise ration
read real relation rental resin rest road roast rodeo rose sailed sailor saint salad salon salt sand
sane seal sealed seaside season sedan senator sender sentinel serial series silent siren sister slide
slot snail soil solar sold soldier solid sonar sorted stain stair stand star stared station steal stole
stone store stored storied tailor tales tenor tested tide tiles tilted tired toad toast toaster toilet
tonal tornado trade trail trailer train tread treason trend trial tries
"""


class Settings(tiny_agents.Settings):
    python: Path = Path(__file__).resolve().parents[1] / ".venv-verifiers" / "bin" / "python"
    """Python interpreter of an environment with verifiers[ta]."""


def hangman(settings: Settings) -> Verifiers:
    """Return the harness: the task set, and an agent that only chats."""
    if shutil.which(settings.python) is None:
        folder = settings.python.parent.parent
        raise UserError(
            f"verifiers is not installed in {folder}. Install it: python -m venv {folder}; "
            f"{folder}/bin/pip install 'verifiers[ta]>=0.4' uv; or set --python to another interpreter"
        )
    words = settings.root.absolute() / "agent_verifiers-words"
    require_folder(words / "corpora" / "words", f"root {str(settings.root)!r}")
    (words / "corpora" / "words" / "en-basic").write_text("\n".join(WORDS.split()))
    os.environ["NLTK_DATA"] = str(words)
    player = {
        "harness": {"id": "verifiers-chat"},
        "runtime": {"type": "subprocess"},
        "max_turns": MOST_TURNS,  # wrong words do not end a game
    }
    return Verifiers(
        env={"taskset": {"id": "textarena", "game": "Hangman-v0"}, "player": player},
        python=settings.python,
        variables=("NLTK_DATA",),
        concurrency=16,
        setup_deadline_s=600,  # importing verifiers takes ten seconds of CPU time
    )


# Demonstrations


def board(word: str, guessed: set[str]) -> str:
    """Return what the game shows after a guess.

    >>> print(board("stone", {"T", "E"}))
    C00 C01 C02 C03 C04
      _   T   _   _   E
    """
    numbers = " ".join(f"C{column:02}" for column in range(len(word)))
    letters = "".join(f"  {letter if letter in guessed else '_'} " for letter in word.upper())
    return f"{numbers}\n{letters}".strip()


def demonstration(task: dict[str, Any], word: str, draw: random.Random) -> dict[str, Any]:
    """Return a game whose guesses are random letters."""
    messages = [
        {"role": "system", "content": task["system_prompt"]},
        {"role": "user", "content": task["prompt"]},
    ]
    guessed: set[str] = set()
    for letter in draw.sample("ABCDEFGHIJKLMNOPQRSTUVWXYZ", 26):
        guessed.add(letter)
        messages.append({"role": "assistant", "content": f"[{letter}]"})
        if len(guessed - {*word.upper()}) == MISSES or guessed >= {*word.upper()}:
            break
        messages.append({"role": "user", "content": board(word, guessed)})
    return {"messages": messages}


def main(settings: Settings) -> None:
    """Train an agent that plays Hangman."""
    harness = hangman(settings)
    rows = harness.rows(TASKS + (8 if settings.small else HELD_OUT))
    tasks, draw = [json.loads(row["task"]) for row in rows], random.Random(settings.seed)
    words = WORDS.split()
    shown = [demonstration(draw.choice(tasks), draw.choice(words), draw) for _ in range(DEMONSTRATIONS)]
    texts = [message["content"] for row in shown[:300] for message in row["messages"]]
    model = tiny_agents.prepare(
        settings, "agent_verifiers", texts=texts, demonstrations=shown, warm_steps=WARM_STEPS
    )

    # Workers
    actor = weft.group(weft.ActorWorker, model=model, learning_rate=1e-3, warmup_steps=5)
    rollout = weft.group(weft.RolloutWorker, model=model, engine=settings.generator)
    rollout.follows(actor)

    # Graph and run
    sampling = weft.Sampling(max_tokens=8)
    train = weft.TableSource("tasks", pa.Table.from_pylist(rows[:TASKS]))
    held_out = weft.TableSource("held_out", pa.Table.from_pylist(rows[TASKS:]))
    training = grpo(train, rollout=rollout, harness=harness, actor=actor, n=8, sampling=sampling)
    accuracy = evaluate(held_out, rollout=rollout, harness=harness, sampling=sampling.greedy, solved=1.0)
    tiny_agents.learn(settings, training, accuracy, actor=actor, title="Hangman agent", prompts=8)


if __name__ == "__main__":
    raise SystemExit(weft.launch(main))
