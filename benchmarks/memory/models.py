"""Tiny models of popular architectures: a trainer against `transformers`, vLLM and two ranks."""

from __future__ import annotations

import math
import multiprocessing
import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import load
from meeting import meetings
from trainer_and_engine import Processes, answer, generate, train
from trainer_and_engine import gap as gap_between

TIMEOUT_S = 1800.0
"""[s] Longest time of a check. On a busy machine one takes minutes."""
VOCABULARY = 128
_SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.1,
}
_EXPERTS = {
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
_WINDOW = {"sliding_window": 16}
_LLAMA_3 = {
    "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen2": ("qwen2", {}),
    "Qwen2.5": ("qwen2", {"tie_word_embeddings": True}),
    "Qwen3": ("qwen3", {}),
    "Qwen3 MoE": ("qwen3_moe", _EXPERTS),
    "Llama 3": ("llama", _LLAMA_3),
    "Mistral": ("mistral", _WINDOW),
    "Mixtral": ("mixtral", _EXPERTS),
    "Gemma 2": ("gemma2", {"query_pre_attn_scalar": 32, **_WINDOW}),
    "Gemma 3": ("gemma3_text", {"query_pre_attn_scalar": 32, **_WINDOW}),
    "Phi-3": ("phi3", {}),
    "OLMo 2": ("olmo2", {}),
    "GPT-OSS": ("gpt_oss", {**_EXPERTS, **_WINDOW}),
}
CHECKS = ("gradient", "saved", "LoRA", "tensor parallel", "sequence parallel", "gap")
TOLERANCE = {
    "gradient": 1e-4,
    "saved": 0.0,
    "LoRA": 1e-4,
    "tensor parallel": 1e-5,
    "sequence parallel": 1e-5,
    "gap": 1e-4,
}
"""Maps a check to its error limit: relative norm for gradients, mean nats for log-probabilities."""


@dataclass(frozen=True)
class Asked:
    """A task for a process: a model, and settings of its trainer."""

    folder: Path
    rank: int = 0
    ranks: int = 1
    meeting: Any = None
    settings: tuple[tuple[str, Any], ...] = ()


def rows() -> Any:
    """Nine rows of uneven lengths; two of them share a prompt."""
    from weft.dataflow.batch import Batch

    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, VOCABULARY, length).tolist() for length in (5, 1, 9, 30, 4, 7, 2, 6)]
    responses = [
        rng.integers(3, VOCABULARY, length).tolist() for length in (3, 12, 1, 25, 6, 2, 9, 4, 8)
    ]
    return Batch.of(prompt_ids=[*prompts, prompts[3]], response_ids=responses)


def actor(asked: Asked) -> Any:
    """Return a trainer of the model, or one of its ranks."""
    from weft.workers.actor import ActorConfig, ActorWorker
    from weft.workers.training.lora import Lora
    from weft.workers.worker import Context

    settings: dict[str, Any] = {
        name: Lora(rank=4) if name == "lora" else value for name, value in asked.settings
    }
    config = ActorConfig(model=str(asked.folder), learning_rate=1e-3, max_grad_norm=None, **settings)
    return ActorWorker(
        config,
        Context("actor", asked.rank, asked.ranks, asked.meeting) if asked.ranks > 1 else Context(),
    )


def gradient_of(worker: Any) -> dict[str, torch.Tensor]:
    """Return the gathered gradient of the mean response log-likelihood, by name."""
    from weft.algorithms.policy_loss import NegativeLogLikelihood

    found: dict[str, torch.Tensor] = {}

    def keep(*_: object) -> None:
        for name, parameter in worker.engine.model.causal_lm.named_parameters():
            if parameter.grad is not None:
                gradient = parameter.grad
                found[name] = (
                    gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
                ).clone()

    hook = worker.engine.optimizer.register_step_pre_hook(keep)
    worker.update(rows(), loss=NegativeLogLikelihood())
    hook.remove()
    return found


@dataclass(frozen=True)
class Error:
    """The deviation from an expected value."""

    value: float
    where: str = ""
    """Place and size of the largest deviation."""

    def __str__(self) -> str:
        return f"{self.value:.1e}"


def difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> Error:
    """Return the difference of two gradients, relative to the norm of the second."""
    if found.keys() != expected.keys():
        return Error(math.inf, f"only one has {min(found.keys() ^ expected.keys())}")
    off = {name: found[name].double() - expected[name].double() for name in expected}
    squares = sum(float(each.square().sum()) for each in off.values())
    worst = max(off, key=lambda name: float(off[name].abs().max()))
    place = [int(i) for i in torch.unravel_index(off[worst].abs().argmax(), off[worst].shape)]
    where = f"{worst}{place} is {float(found[worst][tuple(place)]):.6g}, not {float(expected[worst][tuple(place)]):.6g}"
    return Error(
        math.sqrt(squares / sum(float(t.double().square().sum()) for t in expected.values())), where
    )


def plain_gradient(folder: Path) -> dict[str, torch.Tensor]:
    """Compute the same gradient with `transformers` and eager attention, row by row."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    batch = rows().to_rows()
    tokens = sum(len(row["response_ids"]) for row in batch)
    for row in batch:
        ids = torch.tensor([row["prompt_ids"] + row["response_ids"]])
        logprobs = (
            model(ids, use_cache=False).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        )
        (-logprobs[len(row["prompt_ids"]) - 1 :].sum() / tokens).backward()
    return {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def alone(asked: Asked) -> dict[str, Any]:
    """Run the checks of one rank."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    worker = actor(asked)
    gradient = gradient_of(worker)
    plain = plain_gradient(asked.folder)
    found: dict[str, Any] = {"gradient": difference({name: gradient[name] for name in plain}, plain)}
    worker.save(asked.folder / "saved")
    again: Any = AutoModelForCausalLM.from_pretrained(asked.folder / "saved")
    own = dict(worker.engine.named_tensors())
    off = {name: float((p - own[name]).detach().abs().max()) for name, p in again.named_parameters()}
    found["saved"] = Error(max(off.values()), max(off, key=lambda name: off[name]))
    adapted = actor(Asked(asked.folder, settings=(("lora", True),)))
    adapted.update(rows(), loss=_likelihood())
    said = adapted.logprobs(rows(), into="said").ragged("said")[0]
    adapted.save(asked.folder / "merged", merged=True)
    merged = actor(Asked(asked.folder / "merged")).logprobs(rows(), into="said").ragged("said")[0]
    off = (said - merged).abs()
    found["LoRA"] = Error(
        float(off.mean()), f"{float(off.max()):.2e} nats at token {int(off.argmax())} of {len(off)}"
    )
    return {
        **found,
        "packs": worker.engine.model.packs,
        "shares": worker.engine.model.shares_prompts,
        "own": gradient,
    }


def _likelihood() -> Any:
    from weft.algorithms.policy_loss import NegativeLogLikelihood

    return NegativeLogLikelihood()


def shared(asked: Asked) -> dict[str, torch.Tensor]:
    """Compute the gradient on one of several ranks."""
    torch.set_num_threads(1)
    worker = actor(asked)
    try:
        return gradient_of(worker)
    finally:
        worker.close()


def gap(folder: Path) -> Error:
    """Return the mean logprob difference on vLLM's samples, after vLLM has received the trainer's
    weights."""
    processes = Processes()
    try:
        engine = processes.start(generate, folder, 1, "")
        answer(engine)
        trainer = processes.start(train, folder / "saved", 0, 1, None, {})
        found = gap_between([trainer], {"one": engine}, ("one",), 1)
        for pipe in (engine, trainer):
            pipe.send(None)
        return Error(found)
    finally:
        processes.close()


def in_processes(call: Callable[[Any], Any], asked: list[Any]) -> Any:
    """Call a function in several processes, and return the first one's answer. Raises TimeoutError
    if a process did not finish in time."""
    with multiprocessing.get_context("spawn").Pool(len(asked)) as pool:
        pending = [pool.apply_async(call, (one,)) for one in asked]
        try:
            return next(iter([one.get(TIMEOUT_S) for one in pending]))
        except multiprocessing.TimeoutError:
            late = f"{call.__name__} was not through after {TIMEOUT_S:g} s on {len(asked)} process(es); load {load()}"
            raise TimeoutError(late) from None


def ranks_of(folder: Path, settings: dict[str, Any], count: int = 2) -> list[Asked]:
    """Return the tasks for the ranks of a group."""
    given = tuple(settings.items())
    return [
        Asked(folder, rank, count, meeting, given)
        for rank, meeting in enumerate(meetings(count, TIMEOUT_S))
    ]


def check(name: str, folder: Path, *, generate: bool = True) -> dict[str, Any]:
    """Return the errors of one model by check; text explains a refusal or failure."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    kind, settings = MODELS[name]
    model: Any = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**{**_SMALL, **settings}))
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    tried: dict[str, Callable[[], Any]] = {
        "alone": lambda: in_processes(alone, [Asked(folder)]),
        "tensor parallel": lambda: in_processes(shared, ranks_of(folder, {"tensor_parallel": 2})),
        "sequence parallel": lambda: in_processes(shared, ranks_of(folder, {"sequence_parallel": 2})),
    }
    if generate:
        tried["gap"] = lambda: gap(folder)
    found: dict[str, Any] = {}
    for what, call in tried.items():
        try:
            found[what] = call()
        except Exception as error:
            found[what] = f"{type(error).__name__}: {error}".partition("\n")[0]
    one = found.pop("alone")
    if isinstance(one, str):
        one = {"gradient": one}
    expected: Any = one.pop("own", None)
    for what in ("tensor parallel", "sequence parallel"):
        if not isinstance(found[what], str):
            found[what] = "not compared" if expected is None else difference(found[what], expected)
    return {**one, **found}


def failures(result: dict[str, Any], wanted: Iterable[str]) -> list[str]:
    """Return a line per failed check: name, error, and place of the largest deviation."""
    lines: list[str] = []
    for check in wanted:
        value = result.get(check, "was not reached")
        if isinstance(value, Error) and not value.value <= TOLERANCE[check]:
            lines.append(
                f"{check}: {value} and not {TOLERANCE[check]:g} at most"
                + f"; {value.where}" * bool(value.where)
            )
        elif not isinstance(value, Error):
            lines.append(f"{check}: {value}")
    return lines


def measure(*, quick: bool = False) -> dict[str, Any]:
    """Return `models_ok` and `sp_equal`.

    `models_ok` counts the models that pass every check. `sp_equal` is the largest sequence-parallel
    error over the models that allow it.
    """
    results: dict[str, dict[str, Any]] = {}
    wanted = [check for check in CHECKS if check != "gap" or not quick]
    for name in ("Qwen3",) if quick else MODELS:
        folder = Path(tempfile.mkdtemp(prefix="weft-models-"))
        try:
            results[name] = check(name, folder / "model", generate=not quick)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        shown = {what: str(value) for what, value in results[name].items() if isinstance(value, Error)}
        print(f"  {name:<10} {shown}; load {load()}", flush=True)
        for line in failures(results[name], wanted):
            print(f"  {name:<10} FAILED {line}", flush=True)
    shared = [
        r["sequence parallel"].value for r in results.values() if not failures(r, ["sequence parallel"])
    ]
    return {
        "sp_equal": max(shared, default=None),
        "models_ok": sum(not failures(result, wanted) for result in results.values()),
        "models_tried": len(results),
    }
