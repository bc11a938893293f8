"""Checks of `weft doctor --try` and `--gpu` that run Weft's operations on a small random model, or on one
that the user names."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...dataflow.byte_units import GIB
from .trials import Case, Figures, Trial

if TYPE_CHECKING:
    from ...workers.actor import ActorWorker
    from ...workers.generation.engine import Response
    from ...workers.rollout import RolloutWorker


def save_random_model(folder: Path, *, large: bool) -> Path:
    """Save a randomly initialized Qwen2 model and a tokenizer, without downloads.

    Args:
        large: Use the sizes of Qwen2-0.5B; otherwise tiny ones, which a CPU trains in seconds.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    letters = ["<pad>", "<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = 151_936 if large else 512
    others = (f"<{i}>" for i in range(len(letters), vocabulary))
    names = {name: number for number, name in enumerate([*letters, *others])}
    tokens = Tokenizer(models.BPE(names, []))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokens.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="<pad>", eos_token="<end>")
    tokenizer.save_pretrained(folder)
    sizes = (896, 4864, 24, 14, 2) if large else (64, 128, 2, 2, 2)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=sizes[0],
        intermediate_size=sizes[1],
        num_hidden_layers=sizes[2],
        num_attention_heads=sizes[3],
        num_key_value_heads=sizes[4],
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    (model.bfloat16() if large else model).save_pretrained(folder)
    return folder


def attention(case: Case) -> Figures:
    """Compare log-probabilities of packed rows with eager attention in `transformers`. Name the
    attention of training in bfloat16, and time a microbatch."""
    import torch
    from transformers import AutoModelForCausalLM

    from ...algorithms.policy_loss import NegativeLogLikelihood
    from ...dataflow.batch import Batch
    from ...workers.actor import ActorConfig, ActorWorker
    from ...workers.models.model_folder import read_model_config
    from ...workers.models.transformer import Transformer

    random = str(save_random_model(case.folder / "model", large=case.gpu))
    lengths = enumerate((5, 130, 17, 64))
    rows = [[3 + (7 * row + place) % 200 for place in range(length)] for row, length in lengths]
    with case.phase("load a model in float32"):
        actor = ActorWorker(ActorConfig(model=random))
    engine: Any = actor.engine
    assert engine.model.packs, "the model is not packed"
    found = _logprobs(actor, [row[:1] for row in rows], [row[1:] for row in rows])
    straight = AutoModelForCausalLM.from_pretrained(
        random, dtype=torch.float32, attn_implementation="eager"
    )
    straight = straight.to(engine.device).eval()
    off = 0.0
    for row, mine in zip(rows, found, strict=True):
        ids = torch.tensor([row], device=engine.device)
        with torch.no_grad():
            logprobs = straight(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)
        theirs = logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0].cpu()
        off = max(off, float((theirs - torch.tensor(mine)).abs().max()))
    # [nats] Tolerance for rounding in float32.
    assert off < 1e-3, f"packed rows are {off:.2g} nats off from eager attention"
    del actor, engine, straight
    with case.phase("load the model in bfloat16"):
        actor = ActorWorker(ActorConfig(**_trained(case, case.model or random)))
    engine = actor.engine
    tokens = 16_384 if case.gpu else 512
    half = tokens // 16
    ids = [[3 + (row + k) % 200 for k in range(half)] for row in range(8)]
    batch = Batch.of(prompt_ids=ids, response_ids=ids, group_id=list(range(8)))
    for name in ("first microbatch", "second microbatch"):
        with case.phase(name):
            actor.engine.accumulate(batch, NegativeLogLikelihood(), last=True)
            if case.gpu:
                torch.cuda.synchronize()
    seconds = case.seconds("second microbatch")
    way = _attention_of(engine)
    figures: dict[str, float | str] = {
        "largest difference (nats)": f"{off:.1e}",
        "attention": way,
        f"seconds of {tokens:,} tokens": round(seconds, 2),
    }
    with suppress(ValueError):  # a model whose arithmetic is not known
        sizes = Transformer.of(read_model_config(case.model or random))
        flops = sizes.training_flops([2 * half] * 8, predicted=[half] * 8)
        figures["TFLOP/s of the model"] = round(flops / max(seconds, 1e-3) / 1e12, 2)
    if case.gpu:
        figures["GiB at most"] = round(torch.cuda.max_memory_allocated() / GIB, 1)
        assert way == "packed, varlen", f"training uses the attention {way!r}"
    return figures


def _attention_of(engine: Any) -> str:
    """Return the name that `agreement.py` gives to an engine's way to batch rows."""
    from ...workers.training.packed_attention import VARLEN

    kind = engine.model.causal_lm.config.get_text_config()._attn_implementation
    if engine.model.packs:
        return "packed, varlen" if kind == VARLEN else "packed"
    return "padded, eager" if kind == "eager" else "padded"


def _trained(case: Case, model: str) -> dict[str, Any]:
    """Return the settings of a trained model that fits on one GPU."""
    from ...workers.training.lora import Lora

    lora = {"lora": Lora(rank=16)} if case.model else {}
    return {"model": model, "dtype": "bfloat16", "activation_checkpointing": True, **lora}


def warm_up(case: Case) -> Figures:
    """Start vLLM once, so that its kernels are compiled and cached for the other checks."""
    model = case.model or str(save_random_model(case.folder / "model", large=True))
    with case.phase("start vLLM"):
        rollout = _rollout(case, model, compile=None)
    with case.phase("first responses"):
        _tokens(rollout)
    figures = _facts(rollout)
    rollout.close()
    return figures


def generation(case: Case) -> Figures:
    """Generate with 64 and 256 sequences at the same time, and the first of these twice."""
    model = case.model or str(save_random_model(case.folder / "model", large=case.gpu))
    with case.phase("start the engine"):
        rollout = _rollout(case, model, compile=None)
    figures: dict[str, float | str] = dict(_facts(rollout))
    few, many, tokens = (64, 256, 128) if case.gpu else (4, 8, 16)
    _tokens(rollout, few, tokens)  # compiles kernels for this batch size
    for number in (few, many):
        with case.phase(f"{number} sequences"):
            _, _, steps = _responses(rollout, number, tokens)
        seconds = case.seconds(f"{number} sequences")
        figures[f"ms a step, {number} sequences"] = round(1e3 * seconds / steps, 2)
    same = _tokens(rollout, few, tokens) == _tokens(rollout, few, tokens)
    assert same, "the same seeds sampled different tokens"
    rollout.close()
    return figures


def sleep(case: Case) -> Figures:
    """Let training and vLLM take turns on a GPU five times. vLLM must free its memory, keep its
    residue constant, and then sample the same tokens."""
    import psutil
    import torch

    model = str(save_random_model(case.folder / "model", large=True))
    torch.zeros(1, device="cuda")  # the context of CUDA stays
    empty, process = _used_gib(), psutil.Process()
    with case.phase("start vLLM"):
        rollout = _rollout(case, model, compile=None)
    before = _tokens(rollout)
    awake = _used_gib()
    rollout.offload()
    asleep = [_used_gib()]
    residue = asleep[0] - empty
    with case.phase("start training"):
        actor = _actor(model)
    actor.offload()
    host: list[float] = []
    for turn in range(1, 6):
        with case.phase("training on"):
            actor.onload()
        with case.phase("training off"):
            actor.offload()
        with case.phase("vLLM on"):
            rollout.onload()
        with case.phase("weights"):
            _send_weights(actor, rollout, turn)
        assert _tokens(rollout) == before, (
            f"after sleep {turn}, the same weights sampled different tokens"
        )
        with case.phase("vLLM off"):
            rollout.offload()
        asleep.append(_used_gib())
        host.append(process.memory_info().rss / GIB)
    rollout.close()
    figures: dict[str, float | str] = {
        "GiB awake": round(awake - empty, 2),
        "GiB that sleeping vLLM keeps": round(residue, 2),
        "GiB asleep": " ".join(f"{gib:.2f}" for gib in asleep),
        "GiB of host memory": " ".join(f"{gib:.2f}" for gib in host),
    }
    assert residue < 3.5, f"asleep, vLLM keeps {residue:.2f} GiB"
    grown = asleep[-1] - asleep[1]
    assert grown < 0.25, f"asleep, {grown:.2f} GiB more are used after five turns"
    assert host[-1] - host[1] < 0.5, f"host memory grows: {figures['GiB of host memory']} GiB"
    return figures


def weight_sync(case: Case) -> Figures:
    """Publish bfloat16 weights to an engine three times, and compare log-probabilities of its
    samples. Then train three steps on all GPUs with each transport, which compares checksums."""
    import numpy as np

    model = str(save_random_model(case.folder / "model", large=case.gpu))
    with case.phase("start the engine"):
        rollout = _rollout(case, model, compile=False)
    with case.phase("start training"):
        actor = _actor(model)
    used: list[float] = []
    for version in (1, 2, 3):
        with case.phase(f"version {version}"):
            _send_weights(actor, rollout, version)
        used += [_used_gib()] if case.gpu else []
    prompts, found, _ = _responses(rollout, 4, 16)
    mine = _logprobs(actor, prompts, [np.asarray(one.token_ids).tolist() for one in found])
    gap = np.abs(np.concatenate(mine) - np.concatenate([one.logprobs for one in found]))
    rollout.close()
    # [nats] Tolerance for two programs that compute in bfloat16.
    assert gap.mean() < 0.05, f"log-probabilities are {gap.mean():.3g} nats apart on average"
    if used:
        grown = used[-1] - used[0]
        assert grown < 0.25, f"each version takes more memory of the GPU: {used} GiB"
    figures: dict[str, float | str] = {
        "mean gap (nats)": f"{gap.mean():.1e}",
        "largest gap (nats)": f"{gap.max():.1e}",
        "engine": rollout.config.engine,
    }
    script = case.folder / "transports.py"
    script.write_text(TRANSPORTS)
    for transport in ("auto", "ipc", "vllm:ipc") if case.gpu else ("auto",):
        said = case.python(f'transport="{transport}"', str(script), model, transport)
        figures |= {f"{transport}: {name}": s for name, s in json.loads(said.splitlines()[-1]).items()}
    return figures


TRANSPORTS = """\
import json, sys
import weft
from weft.algorithms.grpo import grpo
from weft.controllers.doctor.operations import letters
from weft.controllers.node_layout import machine_gpus

model, transport = sys.argv[1:]
gpus = machine_gpus()
rows = [{"prompt": f"{a}+{b}="} for a in range(4) for b in range(4)]
prompts = weft.Prompts.from_rows(rows, model, name="prompts")
engine = {"engine": "vllm", "gpu_memory_utilization": 0.5} if gpus else {"engine": "transformers"}
dtype = {"dtype": "bfloat16"} if gpus else {}
actor = weft.group(weft.ActorWorker, model=model, transport=transport, learning_rate=1e-6, **dtype)
rollout = weft.group(weft.RolloutWorker, model=model, max_context=256, **engine, **dtype)
reward = weft.group(weft.RewardWorker, function=letters, tokenizer=model)
rollout.follows(actor)
sampling = weft.Sampling(max_tokens=16)
place = weft.Place(weft.ResourcePool("devices", cpus=gpus or 1, gpus=gpus), ranks=gpus or 1)
with weft.Driver(
    grpo(prompts, rollout=rollout, reward=reward, actor=actor, n=2, sampling=sampling),
    schedule=weft.Synchronous(steps=3, prompts_per_step=16),
    placement={"actor": place, "rollout": place},
    backend=weft.RayBackend() if gpus else weft.Local(),
    root="runs",
    name=transport.replace(":", "-"),
    progress=False,
) as driver:
    last = driver.run()[-1]
shown = ("rollout/weights_transfer_s", "rollout/weights_pause_s", "actor/mean_logprob_gap")
print(json.dumps({name: round(last[name], 4) for name in shown if name in last}))
"""
"""Program of the check "weight sync"."""


def grpo(case: Case) -> Figures:
    """Train three GRPO steps with `weft.train`, resume the run for a fourth, and compare the memory
    with the plan."""
    model = case.model or str(save_random_model(case.folder / "model", large=case.gpu))
    script = case.folder / "grpo.py"
    size = {"n": 8, "max_tokens": 256} if case.gpu else {"n": 4, "max_tokens": 8}
    script.write_text(
        GRPO.format(model=model, size=size, lora="weft.Lora(rank=16)" if case.model else None)
    )
    planned = json.loads(case.python("plan", "-m", "weft", "plan", "--json", str(script), "3", "none"))
    case.python("three steps", str(script), "3", "none")
    case.python("resume for a fourth step", str(script), "4", "latest")
    lines = (case.folder / "steps.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    last = steps[-1]
    assert int(last["step"]) == 4, f"the resumed run ended after step {last['step']}"
    gap = next((last[name] for name in GAPS if name in last), None)
    figures: dict[str, float | str] = {"tokens_per_s": round(last.get("tokens_per_s", 0.0), 1)}
    figures |= {name: round(value, 4) for name, value in last.items() if name.endswith("_s")}
    peaks = {name: value for step in steps for name, value in step.items() if "device_bytes" in name}
    figures |= {name: f"{value / GIB:.2f} GiB" for name, value in peaks.items()}
    if gap is not None:
        figures["mean_logprob_gap"] = round(gap, 5)
        assert gap < 0.05, f"mean_logprob_gap is {gap:.3g} nats"
    for name, value in peaks.items():
        plan = planned["groups"][name.partition("/")[0]]["device"]
        figures[f"planned {name}"] = f"{plan / GIB:.2f} GiB"
        assert value <= 1.15 * max(plan, GIB), (
            f"{name} is {value / GIB:.2f} GiB, and the plan says {plan / GIB:.2f} GiB"
        )
    if case.gpu:
        figures["GiB still in use after its workers ended"] = _used_gib()
    return figures


GAPS = ("actor/mean_logprob_gap", "update/mean_logprob_gap", "mean_logprob_gap")
GRPO = """\
import json, sys
import weft
from weft.controllers.doctor.operations import letters

steps = weft.train(
    {model!r},
    [{{"prompt": f"{{a}}+{{b}}="}} for a in range(4) for b in range(4)],
    letters,
    lora={lora},
    steps=int(sys.argv[1]),
    resume=sys.argv[2],
    prompts_per_step=4,
    checkpoint=weft.CheckpointConfig(every=1),
    root="runs",
    name="doctor",
    progress=False,
    **{size},
)
with open("steps.jsonl", "w") as file:
    file.writelines(json.dumps(step) + "\\n" for step in steps)
"""
"""Program of the check "GRPO"."""


def letters(response: str) -> float:
    """A cheap reward: the share of characters that are letters."""
    return sum(character.isalpha() for character in response) / max(1, len(response))


OPERATIONS = (
    Trial(
        "warm-up",
        "vLLM starts; the first start compiles kernels and takes minutes",
        "VLLM_LOGGING_LEVEL=INFO shows where it hangs; try VLLM_USE_V2_MODEL_RUNNER=0, or compile=False",
        warm_up,
        1200,
        only_on="gpu",
        needs=("driver",),
    ),
    Trial(
        "attention",
        "packed, varlen on GPUs; below 1e-3 nats; above 35 % of the GPU's TFLOP/s for a model of 8B",
        "install the torch of requirements/cuda.txt; on GPUs before Ampere, attention is padded",
        attention,
        600,
        needs=("driver",),  # not vLLM
    ),
    Trial(
        "generation",
        "equal tokens with equal seeds; 8B on an H100: below 18 and 35 ms a step",
        "try VLLM_USE_V2_MODEL_RUNNER=0; another process on the GPU slows it down (nvidia-smi)",
        generation,
        600,
        needs=("driver", "warm-up"),
    ),
    Trial(
        "sleep",
        "asleep, vLLM keeps less than 3.5 GiB; memory is constant; equal tokens after each wake",
        "lower gpu_memory_utilization by what vLLM keeps, or give rollouts a pool of their own",
        sleep,
        600,
        only_on="gpu",
        needs=("driver", "warm-up"),
    ),
    Trial(
        "weight sync",
        "equal checksums; a mean gap below 0.05 nats; constant memory",
        'send the report; with dtype="float32", a gap is an error of the transfer, not of rounding',
        weight_sync,
        1500,
        needs=("driver", "warm-up"),
    ),
    Trial(
        "GRPO",
        "a run trains, resumes, and takes at most 1.15 times the planned memory of GPUs",
        "read runs/doctor/logs of the command in the report; weft plan names settings that save memory",
        grpo,
        1200,
        needs=("driver", "warm-up"),
    ),
)


def _used_gib() -> float:
    import torch

    free, total = torch.cuda.mem_get_info()
    return round((total - free) / GIB, 2)


def _rollout(case: Case, model: str, *, compile: bool | None) -> RolloutWorker:
    from ...workers.rollout import RolloutWorker
    from ...workers.rollout_config import RolloutConfig

    # By default vLLM takes nine tenths of the free memory, which leaves too little for the actor.
    room: dict[str, Any] = {} if case.model else {"kv_cache_gib": 4.0 if case.gpu else 1.0}
    engine = "vllm" if case.gpu else "transformers"
    settings: dict[str, Any] = {"dtype": "bfloat16", "max_context": 512, "compile": compile, **room}
    return RolloutWorker(RolloutConfig(model=model, engine=engine, **settings))


def _actor(model: str) -> ActorWorker:
    from ...workers.actor import ActorConfig, ActorWorker

    return ActorWorker(ActorConfig(model=model, dtype="bfloat16"))


def _facts(rollout: RolloutWorker) -> Mapping[str, float | str]:
    facts: Callable[[], Mapping[str, float | str]] = getattr(rollout.engine, "facts", dict)
    return {"engine": rollout.config.engine, **facts()}


def _send_weights(actor: ActorWorker, rollout: RolloutWorker, version: int) -> None:
    weights = actor.publish_weights(version)
    assert weights is not None
    received, given = rollout.receive_weights(weights), actor.finish_publishing(version)
    different = "the loaded weights have a different checksum than the published ones"
    assert given is not None and received == given.checksum, different


def _responses(
    rollout: RolloutWorker, number: int, tokens: int
) -> tuple[list[list[int]], list[Response], int]:
    """Generate responses with fixed seeds. Return (prompts, responses, engine steps)."""
    import numpy as np

    from ...algorithms.sampling import Sampling
    from ...workers.generation.engine import GenerationRequest, generate

    prompts = [[5 + row % 200, 6, 7 + row % 199] for row in range(number)]
    ids = [np.array(prompt, np.int32) for prompt in prompts]
    requests = [GenerationRequest(row, own, seed=row) for row, own in enumerate(ids)]
    steps = list(generate(rollout.engine, requests, Sampling(max_tokens=tokens, stop=None)))
    found = sorted((one for step in steps for one in step), key=lambda one: one.request_id)
    return prompts, found, len(steps)


def _tokens(rollout: RolloutWorker, number: int = 4, tokens: int = 16) -> list[list[int]]:
    return [list(map(int, one.token_ids)) for one in _responses(rollout, number, tokens)[1]]


def _logprobs(actor: ActorWorker, prompts: Sequence[Any], responses: Sequence[Any]) -> list[list[float]]:
    from ...dataflow.batch import Batch

    batch = Batch.of(prompt_ids=list(prompts), response_ids=list(responses))
    return actor.logprobs(batch, into="found")["found"].to_pylist()
