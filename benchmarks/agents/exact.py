"""Exact tokens: random conversations through the gateway, compared with the engine's own log.

The engine logs the ids that it was given and that it sampled. `problems` says from this log alone what
the training rows must be:

- A row is a chain of turns. Each turn's prompt is all of the row before it, bit for bit. The row begins
  with the first turn's prompt, and ends with the last turn.
- A turn continues the longest earlier turn that its prompt begins with. Without one, it begins a row.
- The mask is 1 for sampled tokens and 0 for given ones. A turn in several rows is trained in one.
- Sampled tokens have the engine's log-probabilities and versions. Given tokens have 0, and the version of the
  next sampled token.

`given_wrong` compares the given tokens with what `transformers` renders for the same messages. The random
engine samples tokenisations that no tokenizer makes, invalid bytes, thinking, calls, and turns that are
cut off. The gap to the trainer is measured with a real engine and a tiny model.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parents[1] / "tests" / "workers"))

FAMILIES = {
    "qwen2": ("qwen2_5", "<|im_end|>"),
    "qwen3": ("qwen3", "<|im_end|>"),
    "llama3": ("llama3_1", "<|eot_id|>"),
    "mistral": ("mistral", "</s>"),
    "gpt_oss": ("gptoss", "<|end|>", "<|call|>"),
}
"""Maps families of `tests/workers/chat_families.py` to the file with the original template, and tokens
that end a turn in the history."""
MAX_TOKENS, MAX_TOKENS_OF_MODEL, MAX_CONTEXT = 96, 24, 4096
IDS = "<i4"
MARK = "zmark7z"


# Training rows, and the engine's turns


@dataclass(frozen=True)
class Sampled:
    """A turn, as the engine saw it. All fields are the bytes of arrays."""

    prompt: bytes
    ids: bytes
    logprobs: bytes
    versions: bytes
    finish_reason: str

    @property
    def whole(self) -> bytes:
        return self.prompt + self.ids

    def follows(self, other: Sampled) -> bool:
        return len(self.prompt) > len(other.whole) and self.prompt.startswith(other.whole)


@dataclass(frozen=True)
class Row:
    """A training row. The arrays have an item for each token of the response."""

    prompt: bytes
    response: bytes
    mask: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    turn_ends: list[int]
    finish_reason: str

    def span(self, turn: Sampled) -> slice | None:
        """Return where a turn is in the response; None if it is not in this row."""
        start = (len(turn.prompt) - len(self.prompt)) // 4
        place = slice(start, start + len(turn.ids) // 4)
        is_here = start >= 0 and (self.prompt + self.response).startswith(turn.whole)
        return place if is_here and self.logprobs[place].tobytes() == turn.logprobs else None


def problems(rows: Sequence[Row], turns: Sequence[Sampled]) -> Iterator[str]:
    """Yield the differences between an episode's rows and the rows that the engine's turns must become."""
    untrained, ends, middles = Counter(turns), set[Sampled](), set[Sampled]()
    for number, row in enumerate(rows):
        path = sorted({t for t in turns if row.span(t)}, key=lambda turn: len(turn.whole))
        if not path or path[0].prompt != row.prompt or path[-1].whole != row.prompt + row.response:
            yield f"row {number} does not have the engine's ids from the first prompt to the last turn"
            continue
        ends.add(path[-1])
        middles.update(path[:-1])
        if any(path[0].follows(other) for other in turns):
            yield f"row {number} begins with a turn that continues another one"
        for before, after in itertools.pairwise(path):
            longest = max((len(t.whole) for t in turns if after.follows(t)), default=0)
            if len(before.whole) != longest:
                yield f"row {number} has a turn after another one than it continues"
        mask, logprobs = np.zeros_like(row.mask), np.zeros_like(row.logprobs)
        versions, turn_ends, given = np.zeros_like(row.versions), list[int](), 0
        for turn in path:
            place = row.span(turn)
            assert place is not None
            logprobs[place] = np.frombuffer(turn.logprobs, np.float32)
            versions[place] = np.frombuffer(turn.versions, np.int32)
            versions[given : place.start] = versions[place.start]  # the next sampled token's
            given = place.stop
            if row.mask[place].any():
                mask[place] = 1
                untrained[turn] -= 1
                turn_ends.append(place.stop)
        wanted = {"mask": mask, "logprobs": logprobs, "versions": versions}
        for name, array in wanted.items():
            if getattr(row, name).tobytes() != array.tobytes():
                yield f"row {number}: {name} differs"
        if row.turn_ends != turn_ends or row.finish_reason != path[-1].finish_reason:
            yield f"row {number} has other ends of turns, or another finish_reason"
    if ends & middles:
        yield "a row is the beginning of another one"
    for turn, number in Counter(turns).items():
        if untrained[turn]:
            yield f"{number} equal turns are trained {number - untrained[turn]} times"


# The engine's log


class Logged:
    """An engine that logs its turns."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._prompts: dict[int, np.ndarray] = {}
        self.turns: list[Sampled] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, request: Any, sampling: Any) -> int:
        ticket = self._engine.submit(request, sampling)
        self._prompts[ticket] = request.prompt_ids.astype(IDS)
        return ticket

    def step(self) -> list[Any]:
        responses = self._engine.step()
        for each in responses:
            prompt, ids = self._prompts.pop(each.ticket), each.token_ids.astype(IDS)
            logprobs, versions = each.logprobs.astype(np.float32), each.versions.astype(np.int32)
            sampled = ids.tobytes(), logprobs.tobytes(), versions.tobytes()
            self.turns.append(Sampled(prompt.tobytes(), *sampled, each.finish_reason))
        return responses


# Episodes


@dataclass
class Episode:
    asked: list[dict[str, Any]]
    turns: list[Sampled]
    rows: list[Row]

    @classmethod
    def of(cls, rows: Any, log: dict[bytes, list[Sampled]]) -> Episode:
        """Return the episode of these rows. Takes its turns out of the log, which has them by their
        log-probabilities."""
        columns = rows.to_rows()
        episode = cls(json.loads(columns[0]["asked"]), [], [_row(each) for each in columns])
        seen = set[bytes]()
        for asked in episode.asked:
            for logprobs in asked.get("logprobs", ()):
                key = np.array(logprobs, np.float32).tobytes()
                if asked["retry"]:
                    assert key in seen, "a repeated request got another turn"
                    continue
                seen.add(key)
                episode.turns.append(log[key].pop())
        return episode


def _row(row: dict[str, Any]) -> Row:
    return Row(
        prompt=np.array(row["prompt_ids"], IDS).tobytes(),
        response=np.array(row["response_ids"], IDS).tobytes(),
        mask=np.array(row["response_mask"], np.uint8),
        logprobs=np.array(row["response_logprobs"], np.float32),
        versions=np.array(row["response_versions"], np.int32),
        turn_ends=list(row["turn_ends"]),
        finish_reason=row["finish_reason"],
    )


Asked = dict[str, Any]
"""A request, as the harness returns it."""


def given_wrong(episode: Episode, tokenizer: Any, closers: Sequence[str]) -> Iterator[str]:
    """Yield errors of the given tokens. They must be the harness's messages as `transformers` renders
    them. A request that continues a conversation must keep its tokens.

    Args:
        closers: texts of the tokens that end a turn in the history.
    """
    turns = iter(episode.turns)
    earlier: list[tuple[Asked, list[Sampled]]] = []
    for asked in episode.asked:
        if asked.get("retry", True):  # or refused
            continue
        turn, *others = mine = [next(turns) for _ in asked["logprobs"]]
        if any(other.prompt != turn.prompt for other in others):
            yield "the choices of a request have different prompts"
        ids = np.frombuffer(turn.prompt, IDS).tolist()
        if "token_ids" in asked:
            if ids != asked["token_ids"]:
                yield "the token route gives other ids than it was sent"
            continue
        at = max((len(one["messages"]) for one, _ in earlier if _continues(asked, one)), default=0)
        known = [one for one in earlier if at and one[0]["messages"] == asked["messages"][:at]]
        earlier.append((asked, mine))
        if not known:
            if _encode(tokenizer, _render(tokenizer, asked, asked["messages"])) != ids:
                yield "the prompt of a new conversation is not what the template renders"
            continue
        before = itertools.chain(*(each for _, each in known))
        parent = next((each for each in before if turn.follows(each)), None)
        if parent is None:
            yield "the prompt of a continued conversation does not have its tokens"
            continue
        tail = ids[len(parent.whole) // 4 :]
        stops = parent.finish_reason == "stop"
        wanted = _tail(tokenizer, asked, at, closers, stops)
        if wanted is not None and _encode(tokenizer, wanted) != tail:
            yield f"given tokens are {tokenizer.decode(tail)!r} instead of {wanted!r}"


def _continues(asked: Asked, other: Asked) -> bool:
    number = len(other["messages"])
    same = all(asked[name] == other[name] for name in ("tools", "variables"))
    return same and len(asked["messages"]) > number and asked["messages"][:number] == other["messages"]


def _tail(tokenizer: Any, asked: Asked, at: int, closers: Sequence[str], stops: bool) -> str | None:
    """Return the text after the assistant's message number `at`: without the token that ends the turn
    if the turn has it already. None if the template refuses the history."""
    messages = [*asked["messages"]]
    mark: dict[str, Any] = {
        "role": "assistant",
        "content": "" if messages[at].get("tool_calls") else MARK,
    }
    if calls := messages[at].get("tool_calls"):
        function = {"name": calls[-1]["function"]["name"], "arguments": json.dumps({"a": MARK})}
        mark["tool_calls"] = [calls[-1] | {"function": function}]
    messages[at] = mark
    try:
        text = _render(tokenizer, asked, messages).rpartition(MARK)[2]
    except Exception:  # Llama 3 refuses histories with several calls at once
        return None
    end, closer = min((text.find(each), each) for each in closers if each in text)
    return text[end + len(closer) :] if stops else text[end:]


def _render(tokenizer: Any, asked: Asked, messages: Sequence[Asked]) -> str:
    return tokenizer.apply_chat_template(
        [_for_template(message) for message in messages],
        tools=asked["tools"] or None,
        add_generation_prompt=True,
        tokenize=False,
        **asked["variables"],
    )


def _encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _for_template(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message in the convention of chat templates."""
    found = message | {"content": message["content"] or ""}
    calls = [call["function"] for call in message.get("tool_calls", ())]
    if calls:
        functions = [each | {"arguments": json.loads(each["arguments"])} for each in calls]
        ids = [call["id"] for call in message["tool_calls"]]
        pairs = zip(ids, functions, strict=True)
        found["tool_calls"] = [{"type": "function", "id": id, "function": f} for id, f in pairs]
    if message.get("reasoning") and not (calls and found["content"]):
        found["thinking"] = message["reasoning"]
    return found


# Measurements


@dataclass
class Held:
    """Conversations that were held."""

    episodes: list[Episode]
    rows: Any
    retokenised: int


def hold(
    worker: Any, family: str, seeds: range, *, append_only: bool, max_tokens: int = MAX_TOKENS
) -> Held:
    """Hold conversations with the worker's model."""
    from weft.algorithms.sampling import Sampling
    from weft.dataflow.batch import Batch
    from weft.workers.agents.harness import Function
    from weft.workers.models.model_folder import read_vocabulary

    prompts = Batch.of(
        **{name: [*seeds] for name in ("sample_id", "group_id", "parent_id", "seed")},
        append_only=[append_only] * len(seeds),
        by_ids=[k % 10 == 9 for k in seeds],
        thinks_not=[family == "qwen3" and k % 3 == 0 for k in seeds],
        vocabulary=[read_vocabulary(worker.config.model)] * len(seeds),
    )
    place = f"{HERE / 'conversations.py'}:converse"
    harness = Function(function=place, writes=("reward", "asked"), concurrency=16)
    made: list[Any] = []
    retokenised = 0
    steps = worker.run(prompts, harness=harness, sampling=Sampling(max_tokens=max_tokens))
    for children, metrics in worker.rank.parts_of(steps):
        made.append(children.rows)
        retokenised += int(metrics["retokenised"].value)
    log: dict[bytes, list[Sampled]] = {}
    for turn in worker.engine.turns:
        log.setdefault(turn.logprobs, []).append(turn)
    worker.engine.turns.clear()
    rows = Batch.concat(made)
    of_row = rows.numpy("episode_id")
    episodes = [Episode.of(rows.take(np.flatnonzero(of_row == id)), log) for id in np.unique(of_row)]
    assert not any(log.values()), "the engine sampled turns that no harness received"
    return Held(episodes, rows, retokenised)


def _write_model(place: Path, family: str, templates: Path) -> Path:
    """Write the folder of a tiny model, with random weights and the family's tokens and template."""
    import torch
    from chat_families import family_folder  # pyright: ignore[reportMissingImports]
    from tokenizers import Tokenizer
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = family_folder(place / family, family)
    original = templates / f"{FAMILIES[family][0]}.jinja"
    if original.is_file():
        (folder / "chat_template.jinja").write_text(original.read_text())
    size: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    size |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    size["vocab_size"] = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    # Weights of this size spread the log-probabilities.
    size |= {"max_position_embeddings": MAX_CONTEXT, "initializer_range": 0.2}
    torch.manual_seed(0)
    torch.set_num_threads(1)  # more threads do not help a tiny model, and hurt on a busy machine
    stops = (folder / "generation_config.json").read_text()
    Qwen3ForCausalLM(Qwen3Config(**size)).save_pretrained(folder)
    (folder / "generation_config.json").write_text(stops)
    print(f"  {family}: {original if original.is_file() else 'template in our own words'}", flush=True)
    return folder


def _new_worker(folder: Path, gateway: Any, family: str = "") -> Any:
    """Return a rollout worker whose engine logs its turns: a random engine for a family, or a real
    one."""
    from as_rank import AsRank
    from random_engine import RandomEngine

    from weft.workers.rollout import RolloutWorker
    from weft.workers.rollout_config import RolloutConfig

    class LoggedWorker(RolloutWorker):
        rank = AsRank(gateway.address)

        def new_engine(self, **settings: Any) -> Any:
            return Logged(RandomEngine(folder, family) if family else super().new_engine(**settings))

    config = RolloutConfig(model=str(folder), engine="transformers", max_context=MAX_CONTEXT)
    return LoggedWorker(config, LoggedWorker.rank.context)


def _gap(folder: Path, rows: Any) -> float:
    """Return the largest difference of a sampled token's log-probabilities in trainer and engine."""
    from weft.workers.actor import ActorConfig, ActorWorker

    actor = ActorWorker(ActorConfig(model=str(folder)))
    ours, _ = actor.logprobs(rows, into="trainer").ragged_numpy("trainer")
    theirs, _ = rows.ragged_numpy("response_logprobs")
    trained = rows.ragged_numpy("response_mask")[0] == 1
    assert theirs[trained].std() > 0.5, "equal log-probabilities would prove little"
    return float(np.abs(ours - theirs)[trained].max())


def measure(
    conversations: int = 1000, gap_conversations: int = 40, templates: Path | None = None
) -> dict[str, Any]:
    """Return `exact`, `retokenised` and `max_logprob_gap`.

    Args:
        conversations: number of conversations with the random engine, half of them append-only.
        gap_conversations: number of conversations with a real engine.
        templates: folder with the original templates of the families, `FAMILIES[...].jinja`; by
            default TRL's, in the environment of the peers. Families without one use the templates
            of `tests/workers/chat_families.py`, which follow the same rules.
    """
    from machine import PEERS  # pyright: ignore[reportMissingImports]
    from transformers import AutoTokenizer

    from weft.controllers.gateway_process import GatewayProcess

    if templates is None:
        shipped = PEERS.parents[1].glob("lib/python3*/site-packages/trl/chat_templates")
        templates = next(shipped, Path("none"))
    number = exact = retokenised = 0
    gaps: list[float] = []
    part = conversations // (2 * len(FAMILIES))
    with (
        tempfile.TemporaryDirectory() as place,
        contextlib.closing(GatewayProcess(Path(place))) as gateway,
    ):
        for family in FAMILIES:
            folder = _write_model(Path(place), family, templates)
            tokenizer = AutoTokenizer.from_pretrained(folder)
            worker = _new_worker(folder, gateway, family)
            held = [hold(worker, family, range(part), append_only=True)]
            retokenised += held[0].retokenised
            held.append(hold(worker, family, range(part, 2 * part), append_only=False))
            worker = _new_worker(folder, gateway)
            seeds = range(gap_conversations // len(FAMILIES))
            most = MAX_TOKENS_OF_MODEL
            held.append(hold(worker, family, seeds, append_only=False, max_tokens=most))
            gaps.append(_gap(folder, held[-1].rows))
            episodes = [*itertools.chain(*(each.episodes for each in held))]
            wrong = [
                [*problems(e.rows, e.turns), *given_wrong(e, tokenizer, FAMILIES[family][1:])]
                for e in episodes
            ]
            number, exact = number + len(wrong), exact + wrong.count([])
            turns, rows = sum(len(e.turns) for e in episodes), sum(len(e.rows) for e in episodes)
            refused = Counter(a["refused"] for e in episodes for a in e.asked if "refused" in a)
            changed = sum(each.retokenised for each in held)
            told = f"{len(wrong)} conversations, {turns} turns, {rows} rows, {changed} retokenised"
            print(f"  {told}; {refused.total()} requests refused; gap {gaps[-1]:.1e}", flush=True)
            for found in [each for each in wrong if each][:3]:
                print(f"  NOT EXACT: {found[:3]}", flush=True)
    return {
        "exact": exact / number,
        "retokenised": retokenised,
        "max_logprob_gap": float(f"{max(gaps):.2g}"),
    }
