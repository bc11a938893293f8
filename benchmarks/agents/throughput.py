"""Tokens per second of agents through the gateway, compared with the bare engine on the same turns, and
the engine's idle share while tools are slow.

The rank's loop, the gateway and the harness are the real ones. A turn has a fixed number of tokens.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

SESSIONS = 64
TURNS = 3
TURN_TOKENS = 96
ROUNDS = 3
TOOL_S, TOOL_SIGMA = 0.5, 1.0
"""[s] Median time of a tool, and the sigma of its log-normal distribution."""
DEADLINE_S = 900.0


async def talk(row: dict[str, Any], *, base_url: str, api_key: str) -> float:
    """Harness: make some turns, each with a short message and perhaps a slow tool."""
    import httpx

    draw = random.Random(row["id"])
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"number {row['id']}"}]
    async with httpx.AsyncClient(base_url=base_url, timeout=None) as client:
        for _ in range(row["turns"]):
            body = {"model": "policy", "messages": messages}
            reply = await client.post("/chat/completions", json=body)
            messages.append(reply.raise_for_status().json()["choices"][0]["message"])
            if row["tool_s"]:
                await asyncio.sleep(row["tool_s"] * draw.lognormvariate(0, row["sigma"]))
            messages.append({"role": "user", "content": "go on"})
    return 1.0


def _enlarge(folder: Path) -> None:
    """Replace the model by one of 29 million parameters, which takes about as long for a step here as
    a real one on a GPU."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    size = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    config = Qwen3Config.from_pretrained(folder)
    config.update({**size, **heads, "layer_types": None})
    Qwen3ForCausalLM(Qwen3Config(**{**config.to_dict(), "layer_types": None})).save_pretrained(folder)


class Setting:
    """A tiny model in a rollout engine, and a gateway."""

    def __init__(self, folder: Path, engine: str) -> None:
        sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))
        import tiny_qwen3  # pyright: ignore[reportMissingImports]

        from weft.controllers.gateway_process import GatewayProcess
        from weft.workers.agents.link import Hello, Link
        from weft.workers.agents.serving import EpisodeServer
        from weft.workers.rollout import RolloutConfig, RolloutWorker

        self.model = str(folder / "model")
        tiny_qwen3.make_model(folder / "model", ["number go on"])
        _enlarge(folder / "model")
        self.worker = RolloutWorker(
            RolloutConfig(model=self.model, engine=engine, max_num_seqs=SESSIONS)  # pyright: ignore[reportArgumentType]
        )
        self.engine: Any = self.worker.engine
        self.gateway = GatewayProcess(folder)
        address, hello = self.gateway.address, Hello("rollout", 0, SESSIONS)
        self._came = threading.Event()
        self.server = EpisodeServer(self.engine, lambda: Link(address, hello, self._came.set))
        self._ids = 0

    def close(self) -> None:
        self.gateway.close()
        self.worker.close()

    def bare(self) -> float:
        """Sample the same turns from the engine alone. Return tokens per second."""
        from weft.algorithms.sampling import Sampling
        from weft.workers.generation.engine import GenerationRequest

        sampling = Sampling(max_tokens=TURN_TOKENS, stop=None)
        draw = np.random.default_rng(0)
        prompts = [draw.integers(10, 200, 12).astype(np.int32) for _ in range(SESSIONS)]
        left = dict.fromkeys(range(SESSIONS), TURNS)
        started = time.perf_counter()
        of = {
            self.engine.submit(GenerationRequest(k, prompts[k], k), sampling): k for k in range(SESSIONS)
        }
        while of:
            for response in self.engine.step():
                k = of.pop(response.request_id)
                left[k] -= 1
                prompts[k] = np.concatenate(
                    [prompts[k], response.token_ids, draw.integers(10, 200, 9).astype(np.int32)]
                )
                if left[k]:
                    request = GenerationRequest(k, prompts[k], k)
                    of[self.engine.submit(request, sampling)] = k
        return SESSIONS * TURNS * TURN_TOKENS / (time.perf_counter() - started)

    def through_gateway(self, tool_s: float = 0.0, turns: int = TURNS) -> tuple[float, float, int]:
        """Run the turns as episodes. Return tokens per second, the engine's idle share, and the number
        of turns."""
        from weft.algorithms.sampling import Sampling
        from weft.workers.agents.harness import Function
        from weft.workers.agents.link import EpisodeRequest, Open

        harness = Function(function=talk, concurrency=SESSIONS, deadline_s=DEADLINE_S)
        sampling = Sampling(max_tokens=TURN_TOKENS, stop=None)
        first, self._ids = self._ids, self._ids + SESSIONS
        row = {"turns": turns, "tool_s": tool_s, "sigma": TOOL_SIGMA}
        episodes = [EpisodeRequest(first + k, k, {"id": k, **row}) for k in range(SESSIONS)]
        pending = {each.episode_id for each in episodes}
        tokens, made, idle_s = 0, 0, 0.0
        started = time.perf_counter()
        plan, most = harness.plan(), self.worker.max_context
        opened = Open(self.model, most, sampling, plan, tuple(episodes))
        self.server.open(opened)
        began: float | None = None
        while pending:
            assert time.perf_counter() - started < DEADLINE_S, f"{len(pending)} episodes did not end"
            was_sampling, before = self.server.is_sampling, time.perf_counter()
            self.server.work()
            if not self.server.is_sampling:
                self._came.wait(0.01)
                self._came.clear()
            if was_sampling and began is None:
                began = before
            if began is not None and not was_sampling:
                idle_s += time.perf_counter() - before
            for ended in self.server.take_ended(opened):
                assert not ended.failure, ended.failure
                assert ended.retokenised == 0
                pending.discard(ended.episode_id)
                made += ended.turns
                tokens += sum(int(row.mask.sum()) for row in ended.rows)
        seconds = time.perf_counter() - started
        self.server.close(opened, ())
        since = time.perf_counter() - (began or started)
        return tokens / seconds, idle_s / since, made


def _measured(work: Callable[[Setting], dict[str, Any]], engine: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        setting = Setting(Path(folder), engine)
        try:
            return work(setting)
        finally:
            setting.close()


def measure(engine: str = "vllm") -> dict[str, Any]:
    """Return `endpoint_overhead` and `idle_share`."""

    def work(setting: Setting) -> dict[str, Any]:
        setting.bare()  # warm up
        setting.through_gateway(turns=1)
        pairs: list[tuple[float, float]] = []
        for _ in range(ROUNDS):
            bare = setting.bare()
            through, _, turns = setting.through_gateway()
            assert turns == SESSIONS * TURNS
            pairs.append((bare, through))
            print(f"  bare {bare:.0f} tokens/s, through the gateway {through:.0f}", flush=True)
        _, idle, _ = setting.through_gateway(tool_s=TOOL_S, turns=2 * TURNS)
        return {
            "endpoint_overhead": round(median(bare / through for bare, through in pairs), 3),
            "bare_tokens_per_s": round(median(bare for bare, _ in pairs)),
            "idle_share": round(idle, 3),
        }

    return _measured(work, engine)
