"""Tokens per second through the gateway, compared with the bare engine, and its idle time with slow tools.

- `endpoint_overhead`: 64 agents make turns through the gateway. Then the bare engine samples the same
  turns: the same tokens between them, the same numbers of sampled tokens, and the same sampling. It
  starts the next turn of a session at once, without a harness. Both are timed from the first request,
  so a harness's start, which a run pays once, does not count.
- `idle_share`: 160 episodes share 64 sessions, and call a tool after each turn. Its time is
  log-normal. The figure is the share of time without any request while all sessions are in use, from
  the first turn until 64 episodes are left, as in a run whose next episodes follow at once.
  `idle_share_to_the_end` includes those 64. Near the end, only tools work.

The rank, the gateway and the harness are the real ones. The engine has one half of the cores, and all
other processes have the other half, because an engine on a GPU does not compete with them either.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import numpy as np

SESSIONS = 64
TURNS = 8
TURN_TOKENS = (32, 96)
"""[tokens] Smallest and largest length of a turn."""
ROUNDS = 5
EPISODES, TOOL_S, TOOL_SIGMA = 160, 0.5, 1.0
"""Number of episodes for the idle share; median time of a tool in seconds, and the sigma of its
log-normal distribution."""
DEADLINE_S = 900.0
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def talk(row: dict[str, Any], *, base_url: str, api_key: str) -> float:
    """Harness: make turns of given lengths, and call a tool after each."""
    place = urlsplit(base_url)
    connection = http.client.HTTPConnection(place.netloc, timeout=DEADLINE_S)
    messages = [{"role": "user", "content": f"number {row['number']}"}]
    for tokens, tool_s in zip(row["tokens"], row["tools_s"], strict=True):
        body = json.dumps({"model": "policy", "messages": messages, "max_tokens": tokens})
        headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        connection.request("POST", f"{place.path}/chat/completions", body, headers)
        reply = connection.getresponse()
        said = json.loads(reply.read())
        if reply.status != 200:
            raise RuntimeError(said)
        messages.append(said["choices"][0]["message"])
        time.sleep(tool_s)
        messages.append({"role": "user", "content": "go on"})
    return 1.0


def episodes(number: int, seed: int, tool_s: float = 0.0) -> list[dict[str, Any]]:
    """Return the columns of prompts: lengths of turns, and times of tools."""
    draw = random.Random(seed)
    rows: list[dict[str, Any]] = []
    for one in range(number):
        tokens = [draw.randint(*TURN_TOKENS) for _ in range(TURNS)]
        tools_s = [tool_s * draw.lognormvariate(0, TOOL_SIGMA) for _ in range(TURNS)]
        rows.append({"number": one, "tokens": tokens, "tools_s": tools_s})
    return rows


@dataclass(frozen=True)
class Script:
    """Turns of a session: token ids that were given before each, and its number of tokens."""

    given: Sequence[np.ndarray]
    tokens: Sequence[int]


class Watched:
    """An engine that measures how long it has no request."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.watch()

    def watch(self) -> None:
        """Measure from the next request."""
        self._began_s = self._last_s = self._idle_s = 0.0

    @property
    def seconds(self) -> float:
        """Seconds since the first request."""
        return time.perf_counter() - self._began_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, *arguments: Any) -> int:
        now_s = time.perf_counter()
        if not self._began_s:
            self._began_s = now_s
        elif not self._engine.num_unfinished:
            self._idle_s += now_s - self._last_s
        return self._engine.submit(*arguments)

    def step(self) -> Any:
        found = self._engine.step()
        self._last_s = time.perf_counter()
        return found

    @property
    def idle_share(self) -> float:
        """Share of the time from the first request until now, without a request at the end."""
        return (self._idle_s + time.perf_counter() - self._last_s) / self.seconds


class Setting:
    """A gateway, and a rank with a small model."""

    def __init__(self, folder: Path, engine: str = "vllm") -> None:
        cores = sorted(os.sched_getaffinity(0))
        self.cores, self.others = cores[: (len(cores) + 1) // 2], cores[len(cores) // 2 :]
        os.sched_setaffinity(0, self.cores)  # before torch counts them
        sys.path.append(str(EXAMPLES))
        import tiny_qwen3  # pyright: ignore[reportMissingImports]
        from as_rank import AsRank  # pyright: ignore[reportMissingImports]

        from weft.controllers.gateway_process import GatewayProcess
        from weft.workers.rollout import RolloutWorker
        from weft.workers.rollout_config import RolloutConfig

        self.model = str(folder / "model")
        tiny_qwen3.make_model(folder / "model", ["number go on"])
        _enlarge(folder / "model")
        os.sched_setaffinity(0, self.others)  # the gateway inherits it, and its harnesses
        self.gateway = GatewayProcess(folder)
        os.sched_setaffinity(0, self.cores)
        config = RolloutConfig(
            model=self.model,
            engine=engine,  # pyright: ignore[reportArgumentType]
            max_num_seqs=SESSIONS,
            seeded=False,
            prefix_caching=engine == "vllm" or None,
        )
        self.rank = AsRank(self.gateway.address)
        self.worker = RolloutWorker(config, self.rank.context)
        self.engine = Watched(self.worker.engine)
        self.worker.engine = self.engine  # pyright: ignore[reportAttributeAccessIssue]
        self._calls = 0

    def close(self) -> None:
        self.gateway.close()
        self.worker.close()

    def bare(self, scripts: Sequence[Script]) -> float:
        """Sample the turns of sessions from the engine alone. Return tokens per second."""
        from weft.workers.generation.engine import GenerationRequest

        prompts = [script.given[0] for script in scripts]
        turns = [0] * len(scripts)
        sessions: dict[int, int] = {}

        def submit(session: int) -> None:
            sampling = _sampling(scripts[session].tokens[turns[session]])
            request = GenerationRequest(session, prompts[session])
            sessions[self.engine.submit(request, sampling)] = session

        self.engine.watch()
        for session in range(len(scripts)):
            submit(session)
        while sessions:
            for response in self.engine.step():
                session = sessions.pop(response.ticket)
                turns[session] += 1
                if turns[session] < len(scripts[session].tokens):
                    given = scripts[session].given[turns[session]]
                    prompts[session] = np.concatenate([prompts[session], response.token_ids, given])
                    submit(session)
        return sum(sum(script.tokens) for script in scripts) / self.engine.seconds

    def run(self, rows: Sequence[dict[str, Any]], harness: Any, *, exact: bool = True) -> Iterator[Any]:
        """Run an episode of each row. Yield rows and metrics of `RolloutWorker.run`. With `exact`, no text
        may be tokenised again."""
        from weft.dataflow.batch import Batch

        self._calls += 1
        ids = np.arange(len(rows)) + (self._calls << 20)
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        prompts = Batch.of(sample_id=ids, group_id=ids, parent_id=ids, **columns)
        by_s = time.perf_counter() + DEADLINE_S
        with closing(
            self.worker.run(prompts, harness=harness, sampling=_sampling(TURN_TOKENS[1]))
        ) as steps:
            for made in self.rank.parts_of(steps):
                assert time.perf_counter() < by_s, "episodes did not end"
                lost, again = (made[1][name].value for name in ("dropped_episodes", "retokenised"))
                assert not lost, f"{lost} episodes were dropped; see the harness's log"
                assert not (exact and again), f"{again} rows were tokenised again"
                yield made

    def talk(self, rows: Sequence[dict[str, Any]]) -> tuple[float, tuple[float, float], list[Script]]:
        """Run episodes of `talk`. Return tokens per second, the engine's idle share until SESSIONS
        episodes are left and until the end, and the scripts."""
        from weft.workers.agents.harness import Function

        harness = Function(function=talk, concurrency=SESSIONS, deadline_s=DEADLINE_S)
        self.engine.watch()
        scripts: list[Script] = []
        in_use = 0.0
        for children, _ in self.run(rows, harness):
            if len(scripts) <= len(rows) - SESSIONS:
                in_use = self.engine.idle_share
            scripts += _scripts(children.rows)
        seconds, idle = self.engine.seconds, (in_use, self.engine.idle_share)
        assert sum(len(one.tokens) for one in scripts) == sum(len(row["tokens"]) for row in rows)
        return sum(sum(script.tokens) for script in scripts) / seconds, idle, scripts


def _scripts(rows: Any) -> Iterator[Script]:
    """Return the turns of rows of episodes."""
    for row in rows.record.to_pylist():
        mask = np.array(row["response_mask"])
        ids, ends = np.array(row["response_ids"], np.int32), row["turn_ends"]
        given = [np.array(row["prompt_ids"], np.int32)]
        tokens: list[int] = []
        for start, end in zip([0, *ends], ends, strict=False):
            tokens.append(int(mask[start:end].sum()))
            if start:
                given.append(ids[start : end - tokens[-1]])
        yield Script(given, tokens)


def _sampling(tokens: int) -> Any:
    from weft.algorithms.sampling import Sampling

    return Sampling(max_tokens=tokens, stop=None)


def _enlarge(folder: Path) -> None:
    """Replace the model by one of five million parameters, whose step takes about as long here as a
    real one's on a GPU."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    values = Qwen3Config.from_pretrained(folder).to_dict()
    values |= {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6}
    values |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "layer_types": None}
    Qwen3ForCausalLM(Qwen3Config(**values)).save_pretrained(folder)


def figures() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, closing(Setting(Path(folder))) as setting:
        rows = episodes(SESSIONS, seed=0)
        _, _, scripts = setting.talk(rows)  # warm up
        setting.bare(scripts)
        pairs: list[tuple[float, float]] = []
        for _ in range(ROUNDS):
            pairs.append((setting.bare(scripts), setting.talk(rows)[0]))
            print(
                f"  bare {pairs[-1][0]:.0f} tokens/s, through the gateway {pairs[-1][1]:.0f}", flush=True
            )
        _, idle, _ = setting.talk(episodes(EPISODES, seed=1, tool_s=TOOL_S))
    return {
        "endpoint_overhead": round(median(bare / through for bare, through in pairs), 3),
        "bare_tokens_per_s": round(median(bare for bare, _ in pairs)),
        "idle_share": round(idle[0], 3),
        "idle_share_to_the_end": round(idle[1], 3),
    }


def in_a_process(file: str) -> dict[str, Any]:
    """Run a program, and return the JSON in the last line that it prints."""
    last = ""
    with subprocess.Popen([sys.executable, file], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for last in process.stdout:
            print(last, end="", flush=True)
    if process.returncode:
        raise RuntimeError(f"{Path(file).name} ended with {process.returncode}")
    return json.loads(last)


def measure() -> dict[str, Any]:
    """Return `endpoint_overhead`, `bare_tokens_per_s` and the idle shares, measured in a new process."""
    return in_a_process(__file__)


if __name__ == "__main__":
    print(json.dumps(figures()))
