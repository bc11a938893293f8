"""New weights from two trainer ranks to one vLLM engine: Weft and three other methods, in turns."""

from __future__ import annotations

import mmap
import os
import statistics
import sys
import tempfile
import time
import warnings
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any, cast

import numpy as np
import ray
import torch
from trainer import RANKS, Timed, Trainer

from weft.algorithms.sampling import Sampling
from weft.workers.generation.engine import GenerationRequest, generate

Seconds = dict[str, float]
CPU = ", processor"
"""Suffix for names of CPU times."""


def save_model(folder: Path, small: bool) -> int:
    """Save a Qwen2 with random float32 weights, and return its bytes."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    hidden, mlp, layers, vocabulary = (64, 96, 2, 64) if small else (768, 2048, 12, 26_000)
    heads = hidden // (32 if small else 64)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=1,
        pad_token_id=0,
    )
    model: Any = Qwen2ForCausalLM(config).float()
    model.save_pretrained(folder)
    return 4 * sum(parameter.numel() for parameter in model.parameters())


class Ways:
    """Both sides of all methods. Each method yields when the trainer is done and vLLM takes over;
    vLLM cannot generate until the end. `disk` overwrites the weights of a copy in the folder
    `model`."""

    def __init__(self, model: Path, model_bytes: int) -> None:
        self._folder = model
        self._version = 0
        self.parts: Seconds = {}
        """[s] Parts of Weft's last transfer, in wall time and in CPU time of the working
        threads."""
        self.cpu_parts: Seconds = {}
        self.pause_s = 0.0
        """[s] Time without sampling in the last double-buffered transfer."""
        settings = {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        ray.init(
            "local",
            num_cpus=RANKS,
            include_dashboard=False,
            log_to_driver=False,
            runtime_env={"env_vars": settings},
        )
        self._trainers: list[Any] = [ray.remote(Trainer).remote() for _ in range(RANKS)]
        port = ray.get(self._trainers[0].port.remote())
        starting = [
            trainer.start.remote(str(model), rank, port) for rank, trainer in enumerate(self._trainers)
        ]
        ray.get(starting, timeout=120)
        self._start_engine(model)
        self._sampling = self._sample()
        self._source, self._target = torch.zeros(2, model_bytes // 4).unbind()

    def _start_engine(self, model: Path) -> None:
        from weft.workers.generation.vllm_engine import VllmEngine
        from weft.workers.generation.vllm_settings import VllmSettings

        self._engine = VllmEngine(
            str(model), VllmSettings(kv_cache_gib=1 / 16, max_num_seqs=4), max_context=64
        )
        from weft.resharding import vllm_writer
        from weft.resharding.incoming import IncomingWeights
        from weft.resharding.vllm_writer import _Layer
        from weft.workers.generation import vllm_worker

        self._llm: Any = self._engine._engine  # pyright: ignore[reportPrivateUsage]
        self._receiver = self._llm.collective_rpc(lambda worker: worker.weight_transfer_engine)[0]
        self._timed = Timed()
        self._timed.watch("checksums", vllm_worker, "start_sum")
        self._timed.watch(
            "repacking",
            vllm_writer,
            "initialize_layerwise_reload",
            "finalize_layerwise_reload",
            "process_tied",
        )
        self._timed.watch("repacking", _Layer, "start", "complete")
        self._timed.watch("waits", IncomingWeights, "_ready")
        self._read: Counter[int] = Counter()
        slices = IncomingWeights.slices

        def counted(incoming: IncomingWeights, copies: Any) -> Iterator[tuple[str, Any, torch.Tensor]]:
            for name, copy, elements in slices(incoming, copies):
                self._read[copy.source] += elements.nbytes
                yield name, copy, elements

        cast(Any, IncomingWeights).slices = counted

    def close(self) -> None:
        self._engine.close()
        ray.shutdown()

    def wire_equals_plan(self) -> bool:
        """Return whether the last transfer read exactly the planned bytes from each rank's
        memory."""
        plan = self._receiver._plan
        return [self._read[rank] for rank in range(RANKS)] == plan.sent_bytes.tolist()

    def _all(self, method: str, *arguments: Any) -> list[Any]:
        return ray.get(
            [getattr(trainer, method).remote(*arguments) for trainer in self._trainers], timeout=120
        )

    def copies(self) -> tuple[float, float]:
        """Return wall and CPU seconds of one plain copy of the bytes, by a thread of vLLM's
        process."""
        start, start_cpu = time.perf_counter(), time.thread_time()
        np.copyto(self._target.numpy(), self._source.numpy())
        return time.perf_counter() - start, time.thread_time() - start_cpu

    def change(self) -> None:
        self._all("change")

    def weft(self) -> Iterator[None]:
        self._version += 1
        weights = reduce(add, self._all("publish", self._version))
        yield
        self._timed.seconds.clear()
        self._timed.of_processor.clear()
        self._read.clear()
        start, start_cpu = time.perf_counter(), time.thread_time()
        checksum = self._engine.update_weights(weights.to("rollout[0]"))
        taken = time.perf_counter() - start, time.thread_time() - start_cpu
        finished = self._all("finish", self._version)
        if reduce(add, (given for given, _, _ in finished)).checksum != checksum:
            raise RuntimeError("vLLM received another checksum than the trainer sent")
        spent = self._timed.seconds, self._timed.of_processor
        self.parts, self.cpu_parts = (
            self._split([published[1 + kind] for published in finished], taken[kind], spent[kind])
            for kind in range(2)
        )

    def gloo(self) -> Iterator[None]:
        """Weft with `ActorConfig.transport="gloo"`: each rank sends what vLLM needs, without mapped
        memory."""
        self._version += 1
        weights = reduce(add, self._all("publish", self._version, "gloo"))
        yield
        checksum = self._engine.update_weights(weights.to("rollout[0]"))
        if (
            reduce(add, (given for given, _, _ in self._all("finish", self._version))).checksum
            != checksum
        ):
            raise RuntimeError("vLLM received another checksum than the trainer sent")

    def double_buffer(self) -> Iterator[None]:
        """Weft with `RolloutConfig.double_buffer`: sampling continues while a version arrives."""
        self._version += 1
        weights = reduce(add, self._all("publish", self._version)).to("rollout[0]")
        yield
        for _ in self._engine.stage_weights(weights):
            next(self._sampling)
        start = time.perf_counter()
        checksum = self._engine.update_weights(weights)
        self.pause_s = time.perf_counter() - start
        if (
            reduce(add, (given for given, _, _ in self._all("finish", self._version))).checksum
            != checksum
        ):
            raise RuntimeError("vLLM received another checksum than the trainer sent")

    def _sample(self) -> Iterator[None]:
        """Sample responses endlessly."""
        sampling = Sampling(max_tokens=48, stop=None)
        while True:
            prompts = [
                GenerationRequest(row, np.arange(2, 10, dtype=np.int32), seed=row) for row in range(4)
            ]
            for _ in generate(self._engine, prompts, sampling):
                yield

    def _split(self, published: list[Seconds], taken: float, spent: Seconds) -> Seconds:
        return {
            "publish: copies": max(of_rank["copies"] for of_rank in published),
            "publish: checksums": max(of_rank["checksums"] for of_rank in published),
            "receive: waits": spent["waits"],
            "receive: copies": taken - spent["waits"] - spent["checksums"] - spent["repacking"],
            "receive: checksums": spent["checksums"],
            "receive: repacking by vLLM": spent["repacking"],
        }

    def gather(self) -> Iterator[None]:
        location, num_bytes, entries, checksum = self._all("gather")[0]
        yield
        file = os.open(location, os.O_RDONLY)
        memory = mmap.mmap(
            file, num_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
        )
        os.close(file)
        tensors = {
            name: torch.frombuffer(
                memory, dtype=torch.float32, count=torch.Size(shape).numel(), offset=offset
            ).view(shape)
            for name, shape, offset in entries
        }
        found = 0
        for tensor in tensors.values():
            content: Any = tensor.view(-1).view(torch.uint8).numpy()
            found = zlib.crc32(memoryview(content), found)
        if found != checksum:
            raise RuntimeError(
                f"the trainer sent CRC-32 {checksum:08x}, the engine received {found:08x}"
            )
        self._load(tensors.items())

    def object_store(self) -> Iterator[None]:
        (reference,) = self._all("put")[0]
        yield
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the arrays are read-only
            arrays: Any = ray.get(reference)
            self._load((name, torch.from_numpy(array)) for name, array in arrays.items())

    def disk(self) -> Iterator[None]:
        self._all("save", str(self._folder))
        yield
        self._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(self._folder)})

    def _load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        model = self._receiver.model
        initialize_layerwise_reload(model)
        model.load_weights(tensors)
        finalize_layerwise_reload(model, self._receiver.model_config)


def timed(way: Callable[[], Iterator[None]]) -> tuple[float, float]:
    """Return the seconds of the trainer's part, and of vLLM's part."""
    start = time.perf_counter()
    sides = way()
    next(sides)
    given = time.perf_counter()
    next(sides, None)
    return given - start, time.perf_counter() - given


def measure(rounds: int = 7, *, small: bool = False) -> dict[str, Any]:
    """Run all methods in turns, and return medians. The first round does not count."""
    with tempfile.TemporaryDirectory(prefix="weft-resharding-") as folder:
        model_bytes = save_model(Path(folder), small)
        ways = Ways(Path(folder), model_bytes)
        try:
            found, right = _rounds(ways, rounds)
        finally:
            ways.close()
    middle = {name: statistics.median(values[1:]) for name, values in found.items()}
    whole = {name: middle[name] for name in ("weft", "gather", "object_store", "disk")}

    def wire(kind: str) -> float:
        moved = middle[f"publish: copies{kind}"] + middle[f"receive: copies{kind}"]
        return round(moved / middle[f"plain copies{kind}"], 2)

    return {
        "wire_equals_plan": right,
        "wire_over_memcpy": wire(""),
        "wire_over_memcpy_cpu": wire(CPU),
        **{
            f"speedup_over_{name}": round(s / whole["weft"], 2)
            for name, s in whole.items()
            if name != "weft"
        },
        "gloo_over_mapped": round(middle["gloo"] / whole["weft"], 2),
        "pause_share": round(middle["double_buffer: paused"] / whole["weft"], 3),
        "pause_share_without": round(middle["weft: paused"] / whole["weft"], 3),
        "seconds": {name: round(value, 4) for name, value in middle.items()},
        "model_bytes": model_bytes,
    }


def _rounds(ways: Ways, rounds: int) -> tuple[dict[str, list[float]], bool]:
    found: dict[str, list[float]] = defaultdict(list)
    right = True
    for _ in range(rounds + 1):
        for way in (ways.weft, ways.gloo, ways.gather, ways.object_store, ways.disk):
            ways.change()
            given, paused = timed(way)
            found[way.__name__].append(given + paused)
            found[f"{way.__name__}: paused"].append(paused)
            if way == ways.weft:
                right &= ways.wire_equals_plan()
        ways.change()
        found["double_buffer"].append(sum(timed(ways.double_buffer)))
        found["double_buffer: paused"].append(ways.pause_s)
        for kind, seconds in zip(("", CPU), ways.copies(), strict=True):
            found[f"plain copies{kind}"].append(seconds)
        for kind, parts in (("", ways.parts), (CPU, ways.cpu_parts)):
            for name, seconds in parts.items():
                found[name + kind].append(seconds)
        print(", ".join(f"{name} {seconds[-1]:.2f}" for name, seconds in found.items()), flush=True)
    return found, right
