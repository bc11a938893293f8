"""A run of conversations for `demo_runs.py`: a tiny model calls a calculator, gets an answer, and
continues."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import weft
from examples.tiny_qwen3 import make_model
from weft.algorithms.advantages import group_advantages
from weft.algorithms.methods import supervised
from weft.algorithms.sampling import Sampling
from weft.dataflow.prompts.tokenizer import Tokenizer
from weft.workers.generation.engine import GenerationEngine, GenerationRequest, Response

SYSTEM = 'Call the calculator: <tool_call>{"name": "calculator", "arguments": {"expression": "2 + 3"}}</tool_call>. Then answer.'
CALL = re.compile(r'<tool_call>.*?"expression": "(\d+) \+ (\d+)".*?</tool_call>', re.DOTALL)


class Dialogues:
    """An engine that lets the calculator answer, and then continues the response. The calculator's
    tokens are not sampled, so their log-probabilities are nan.

    Args:
        engine: samples the model's turns.
        tokenizer: tokenizer of the model.
    """

    def __init__(self, engine: GenerationEngine, tokenizer: Tokenizer) -> None:
        self._engine, self._tokenizer = engine, tokenizer
        self._asked: dict[int, tuple[GenerationRequest, Sampling]] = {}
        self._called: dict[int, tuple[Response, np.ndarray]] = {}
        """Tickets of second turns -> first turn, and the calculator's answer."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, request: GenerationRequest, sampling: Sampling) -> int:
        ticket = self._engine.submit(request, sampling)
        self._asked[ticket] = request, sampling
        return ticket

    def step(self) -> list[Response]:
        complete: list[Response] = []
        for turn in self._engine.step():
            request, sampling = self._asked.pop(turn.ticket)
            if turn.ticket in self._called:
                complete.append(_joined(*self._called.pop(turn.ticket), turn))
            elif (answer := self._answer(turn)) is None:
                complete.append(turn)
            else:
                ids = np.concatenate([request.prompt_ids, turn.token_ids, answer])
                ticket = self.submit(replace(request, prompt_ids=ids, seed=None), sampling)
                self._called[ticket] = turn, answer
        return complete

    def abort(self, tickets: Collection[int]) -> None:
        turns = [turn for turn, (first, _) in self._called.items() if first.ticket in tickets]
        self._engine.abort([*tickets, *turns])
        for ticket in (*tickets, *turns):
            self._asked.pop(ticket, None)
            self._called.pop(ticket, None)

    def _answer(self, response: Response) -> np.ndarray | None:
        """Return the tokens that answer a call, or None without a call."""
        called = CALL.search(
            self._tokenizer.backend.decode(response.token_ids.tolist(), skip_special_tokens=False)
        )
        if called is None or response.finish_reason != "stop":
            return None
        text = (
            f"\n<|im_start|>tool\n{int(called[1]) + int(called[2])}<|im_end|>\n<|im_start|>assistant\n"
        )
        return np.array(self._tokenizer.backend.encode(text, add_special_tokens=False).ids, np.int32)


def _joined(first: Response, answer: np.ndarray, second: Response) -> Response:
    unsampled = (
        np.full(len(answer), np.nan, np.float32),
        np.full(len(answer), first.versions[-1], np.int32),
    )
    parts = [(r.token_ids, r.logprobs, r.versions) for r in (first, second)]
    ids, logprobs, versions = map(
        np.concatenate, zip(parts[0], (answer, *unsampled), parts[1], strict=True)
    )
    return replace(
        first, token_ids=ids, logprobs=logprobs, versions=versions, finish_reason=second.finish_reason
    )


class DialogueWorker(weft.RolloutWorker):
    def new_engine(self, **settings: Any) -> GenerationEngine:
        return Dialogues(super().new_engine(**settings), Tokenizer.load(self._folder))  # pyright: ignore[reportReturnType]


@weft.node(reads=("response_logprobs",), writes=("response_mask",))
def only_sampled(samples):
    """Train on the model's tokens only, not on the calculator's."""
    values, offsets = samples.ragged_numpy("response_logprobs")
    return samples.with_columns(response_mask=(np.isfinite(values).astype(np.uint8), offsets))


@weft.graph
def dialogues(prompts, *, rollout, reward, actor, sampling):
    samples = only_sampled(rollout.generate(prompts, n=4, sampling=sampling))
    return actor.update(group_advantages(reward.score(samples)))


def right_sum(response: str, answer: str) -> float:
    """Return 1 for the correct sum, a quarter for a call of the calculator."""
    return 1.0 if f"It is {answer}." in response else 0.25 * bool(CALL.search(response))


def train(root: Path, name: str = "dialogues", steps: int = 12, taught: int = 150) -> None:
    """Teach a tiny model the syntax of a call, then train it on sums."""
    model = str(root / ".data" / "calling")
    if not Path(model).exists():
        _teach(root / ".data", taught)
    prompts = weft.Prompts.from_rows([_problem(*pair) for pair in _pairs(96, 1)], model, name="sums")
    actor = weft.group(weft.ActorWorker, model=model, learning_rate=3e-4)
    rollout = weft.group(DialogueWorker, name="rollout", model=model, engine="transformers")
    reward = weft.group(weft.RewardWorker, function=right_sum, tokenizer=model)
    rollout.follows(actor)
    graph = dialogues(
        prompts, rollout=rollout, reward=reward, actor=actor, sampling=weft.Sampling(max_tokens=64)
    )
    schedule = weft.Synchronous(steps=steps, prompts_per_step=8)
    with weft.Driver(graph, schedule=schedule, root=root, name=name, stop_on=()) as driver:
        driver.run()


def _pairs(number: int, seed: int) -> list[tuple[int, int]]:
    draw = random.Random(seed)
    return [(draw.randint(1, 20), draw.randint(1, 20)) for _ in range(number)]


def _problem(a: int, b: int) -> dict[str, Any]:
    asked = {"role": "user", "content": f"What is {a} + {b}?"}
    return {"prompt": [{"role": "system", "content": SYSTEM}, asked], "answer": str(a + b)}


def _teach(data: Path, steps: int) -> None:
    """Return a model trained on calls and answers."""
    shown: list[Mapping[str, Any]] = []
    for a, b in _pairs(400, 0):
        called = {"name": "calculator", "arguments": {"expression": f"{a} + {b}"}}
        call = {"role": "assistant", "content": f"<tool_call>{json.dumps(called)}</tool_call>"}
        begun = [*_problem(a, b)["prompt"], call]
        ended = [
            {"role": "tool", "content": str(a + b)},
            {"role": "assistant", "content": f"It is {a + b}."},
        ]
        shown += [{"messages": begun}, {"messages": [*begun, *ended]}]
    untrained = data / "untrained"
    make_model(untrained, [SYSTEM, *(turn["content"] for row in shown for turn in row["messages"])])
    model = str(untrained)
    actor = weft.group(weft.ActorWorker, model=model, learning_rate=3e-3, warmup_steps=5)
    graph = supervised(weft.Prompts.from_rows(shown, model, name="shown"), actor=actor)
    schedule = weft.Synchronous(steps=steps, prompts_per_step=16)
    with weft.Driver(
        graph, schedule=schedule, root=data, name="taught", record_every=0, progress=False
    ) as driver:
        driver.run()
        driver.call(actor, "save", path=data / "calling")
