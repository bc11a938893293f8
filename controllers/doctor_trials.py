"""Trials of `weft doctor --try` and `--gpu`: small operations, each in a separate process.

A trial that fails, hangs or crashes does not stop the others.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..dataflow.byte_units import GIB
from ..dataflow.child_process import ChildProcess
from ..dataflow.errors import UserError
from ..dataflow.untrusted_text import show

if TYPE_CHECKING:
    from ..workers.actor import ActorWorker
    from ..workers.rollout import RolloutWorker

Figures = Mapping[str, float | str]
"""Measurements of a trial: name (with its unit) -> value."""


@dataclass(frozen=True)
class _Trial:
    name: str
    claim: str
    """The claim of the documentation that the trial supports, with its page."""
    run: Callable[[Path, bool], Figures]
    """Module-level function of (folder, whether to use GPUs). Raises AssertionError on failure."""
    deadline_s: float
    skipped_on_cpu: str = ""
    """Reason to skip the trial without GPUs; empty to run it."""


@dataclass(frozen=True)
class _TrialRecord:
    name: str
    claim: str
    outcome: Literal["passed", "failed", "skipped"]
    seconds: float
    why: str = ""
    figures: Figures = field(default_factory=dict)


def run_trials(gpu: bool, trials: Sequence[_Trial] | None = None) -> list[_TrialRecord]:
    """Run the trials, and print the name of each when it begins.

    Args:
        gpu: Use the GPUs of this machine; otherwise skip trials that need some.
        trials: Trials to run; by default, all.

    Raises:
        UserError: torch finds no usable GPU.
    """
    if gpu:
        import torch

        if not torch.cuda.is_available():
            raise UserError(
                f"--gpu: torch {torch.__version__} finds no GPU here; --try runs the checks that a CPU allows"
            )
    records: list[_TrialRecord] = []
    for trial in TRIALS if trials is None else trials:
        show(f"{trial.name} ...")
        records.append(run_trial(trial, gpu))
    return records


def run_trial(trial: _Trial, gpu: bool) -> _TrialRecord:
    """Run a trial in a separate process. At its deadline, kill the process and its children."""
    if trial.skipped_on_cpu and not gpu:
        return _TrialRecord(trial.name, trial.claim, "skipped", 0.0, trial.skipped_on_cpu)
    started, figures = time.monotonic(), {}
    place = f"{trial.run.__module__}:{trial.run.__name__}"
    with tempfile.TemporaryDirectory(prefix="weft-doctor-") as folder:
        hidden = {} if gpu else {"CUDA_VISIBLE_DEVICES": ""}
        words = (place, folder, "gpu" if gpu else "cpu")
        child = ChildProcess(__name__, *words, environment=hidden, detached=True)
        answer = Path(folder, ANSWER)
        try:
            if not child.wait(trial.deadline_s):
                why = f"it did not end in {trial.deadline_s:g} s"
            elif not answer.is_file():
                why = f"its process ended with {child.status}"
            else:
                why, figures = json.loads(answer.read_text())
        finally:
            # A trial that has ended may have left child processes.
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            # Briefly: a process that hangs in a device driver ends when the device answers.
            child.wait(0.5)
            child.close_input()
            child.stdout.close()
    seconds = round(time.monotonic() - started, 1)
    return _TrialRecord(trial.name, trial.claim, "failed" if why else "passed", seconds, why, figures)


ANSWER = "answer.json"


def _main(place: str, folder: str, device: str) -> None:
    """Run a trial's function, and write its error and figures to the file ANSWER."""
    os.chdir(folder)
    # Send the output of the trial and of its children to a file.
    os.dup2(os.open("output", os.O_WRONLY | os.O_CREAT), sys.stdout.fileno())
    module, _, function = place.partition(":")
    why, figures = "", {}
    try:
        run = getattr(importlib.import_module(module), function)
        figures = dict(run(Path(folder), device == "gpu"))
    except BaseException as error:
        traceback.print_exc()
        # chr(10), because Python 3.11 allows no backslash in an f-string expression.
        why = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    Path(ANSWER).write_text(json.dumps([why, figures]))
    os._exit(0)  # do not wait for threads of libraries


def table_of(records: list[_TrialRecord]) -> str:
    """Format the records as text, two lines each."""
    lines: list[str] = []
    for one in records:
        figures = ", ".join(f"{name} {value}" for name, value in one.figures.items())
        lines.append(f"{one.outcome:8}{one.name:22}{one.seconds:6.1f} s  {one.why or figures}")
        lines.append(f"{'':8}supports: {one.claim}")
    return "\n".join(lines)


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


# Trials


def packed_attention(folder: Path, gpu: bool) -> Figures:
    """Compare log-probabilities of packed rows with eager attention in `transformers`."""
    import torch
    from transformers import AutoModelForCausalLM

    from ..workers.actor import ActorConfig, ActorWorker

    model = save_random_model(folder / "model", large=gpu)
    lengths = enumerate((5, 130, 17, 64))
    rows = [[3 + (7 * row + place) % 200 for place in range(length)] for row, length in lengths]
    actor = ActorWorker(ActorConfig(model=str(model)))
    engine: Any = actor.engine
    assert engine.model.packs, "the model is not packed"
    found = _logprobs(actor, [row[:1] for row in rows], [row[1:] for row in rows])
    straight = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
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
    return {"largest difference (nats)": f"{off:.1e}", "device": str(engine.device)}


def weight_sync(folder: Path, gpu: bool) -> Figures:
    """Publish bfloat16 weights to an engine, and compare log-probabilities of its samples."""
    import numpy as np

    actor, rollout = _pair(folder, gpu)
    started = time.perf_counter()
    _send_weights(actor, rollout)
    seconds = time.perf_counter() - started
    prompts, responses, theirs = _sampled(rollout)
    mine = _logprobs(actor, prompts, responses)
    gap = np.abs(np.concatenate(mine) - np.concatenate(theirs))
    rollout.close()
    # [nats] Tolerance for two programs that compute in bfloat16.
    assert gap.mean() < 0.05, f"log-probabilities are {gap.mean():.3g} nats apart on average"
    return {
        "seconds": round(seconds, 2),
        "mean gap (nats)": f"{gap.mean():.1e}",
        "largest gap (nats)": f"{gap.max():.1e}",
        "engine": rollout.config.engine,
    }


def colocated(folder: Path, gpu: bool) -> Figures:
    """Run training and vLLM in turns on one GPU. Each must free its memory for the other, and vLLM
    must then sample the same tokens as before."""
    actor, rollout = _pair(folder, gpu)
    both = _used_gib()
    before = _sampled(rollout)[1]
    rollout.offload()
    asleep = _used_gib()
    actor.offload()
    away = _used_gib()
    rollout.onload()
    _send_weights(actor, rollout)
    again = _sampled(rollout)[1]
    rollout.offload()
    actor.onload()
    rollout.close()
    assert asleep < both and away < asleep, (
        f"sleep freed no memory: {both} GiB, asleep {asleep}, training away {away}"
    )
    assert before == again, "the same weights sampled different tokens after the wake"
    return {
        "GiB with both": both,
        "GiB with vLLM asleep": asleep,
        "GiB with training away as well": away,
    }


def collectives(folder: Path, gpu: bool) -> Figures:
    """Run the collectives of training over all GPUs (NCCL), or over two processes (gloo)."""
    import torch

    ranks = torch.cuda.device_count() if gpu else 2
    collect = partial(_collect, f"file://{folder}/rendezvous", ranks, gpu)
    with multiprocessing.get_context("spawn").Pool(ranks) as pool:  # CUDA does not survive a fork
        # This raises a rank's error at once, even while other ranks wait for it.
        found = pool.imap_unordered(collect, range(ranks))
        slowest = max(found.next(timeout=50) for _ in range(ranks))
    return {
        "ranks": ranks,
        "backend": "nccl" if gpu else "gloo",
        "all-reduce of 64 MiB (ms)": round(1e3 * slowest, 1),
    }


def _collect(rendezvous: str, ranks: int, gpu: bool, rank: int) -> float:
    """Check the collectives on one rank. Return the duration of an all-reduce in seconds."""
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    backend = "nccl" if gpu else "gloo"
    dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=ranks)
    numbers = torch.full((16 * 2**20,), float(rank + 1), device=device)
    dist.all_reduce(numbers)
    expected = ranks * (ranks + 1) / 2
    wrong = f"rank {rank}: the sum over ranks is {numbers[0]}, not {expected}"
    assert bool((numbers == expected).all()), wrong
    parts = [torch.empty(1, device=device) for _ in range(ranks)]
    dist.all_gather(parts, torch.tensor([float(rank)], device=device))
    assert [int(part) for part in parts] == list(range(ranks)), f"rank {rank}: gathered {parts}"
    # The first all-reduce also opened the connections.
    started = time.perf_counter()
    dist.all_reduce(numbers)
    if gpu:
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - started
    dist.destroy_process_group()
    return seconds


def grpo(folder: Path, gpu: bool) -> Figures:
    """Train a random model for twenty GRPO steps with `weft.train`."""
    from .train import train

    model = save_random_model(folder / "model", large=gpu)
    started = time.perf_counter()
    steps = train(
        str(model),
        [{"prompt": f"{a}+{b}="} for a in range(8) for b in range(8)],
        letters,
        steps=20,
        prompts_per_step=8,
        n=4,
        max_tokens=128 if gpu else 8,
        learning_rate=1e-6 if gpu else 1e-3,
        root=str(folder / "runs"),
        name="doctor",
        progress=False,
    )
    seconds = time.perf_counter() - started
    last = steps[-1]
    assert int(last["step"]) == 20, f"the run ended after step {last['step']}"
    figures: dict[str, float | str] = {"steps": 20, "seconds": round(seconds, 1)}
    shown = ("tokens_per_s", "actor/mean_logprob_gap", "update/mean_logprob_gap", "mean_logprob_gap")
    for name, value in last.items():
        if name in shown or name.startswith("time/"):
            figures[name] = round(value, 4)
    if gpu:
        figures["GiB still in use after its workers ended"] = _used_gib()
    return figures


def letters(response: str) -> float:
    """A cheap reward: the share of characters that are letters."""
    return sum(character.isalpha() for character in response) / max(1, len(response))


ARCHITECTURE = "(docs/architecture.md)"
TRIALS = (
    _Trial(
        "packed attention",
        f"rows are packed and answer as eager attention does {ARCHITECTURE}",
        packed_attention,
        90,
    ),
    _Trial(
        "collectives", f"ranks of a group are joined over NCCL or gloo {ARCHITECTURE}", collectives, 60
    ),
    _Trial(
        "weight sync", f"published weights arrive, by their checksum {ARCHITECTURE}", weight_sync, 130
    ),
    _Trial(
        "colocated",
        f"groups of one pool take turns on its devices {ARCHITECTURE}",
        colocated,
        130,
        "needs a GPU: on a CPU nothing is moved",
    ),
    _Trial("GRPO", "one call trains, on GPUs with vLLM (docs/train.md)", grpo, 190),
)


def _used_gib() -> float:
    import torch

    free, total = torch.cuda.mem_get_info()
    return round((total - free) / GIB, 2)


def _pair(folder: Path, gpu: bool) -> tuple[ActorWorker, RolloutWorker]:
    """Return an actor and a rollout of one random bfloat16 model, in this process."""
    from ..workers.actor import ActorConfig, ActorWorker
    from ..workers.rollout import RolloutConfig, RolloutWorker

    model = str(save_random_model(folder / "model", large=gpu))
    engine = "vllm" if gpu else "transformers"
    # By default vLLM takes nine tenths of the free memory, which leaves too little for the actor.
    shared: dict[str, Any] = {"dtype": "bfloat16", "max_context": 512, "kv_cache_gib": 1.0}
    rollout = RolloutWorker(RolloutConfig(model=model, engine=engine, **shared))
    return ActorWorker(ActorConfig(model=model, dtype="bfloat16")), rollout


def _send_weights(actor: ActorWorker, rollout: RolloutWorker) -> None:
    weights = actor.publish_weights(1)
    assert weights is not None
    received, given = rollout.receive_weights(weights), actor.finish_publishing(1)
    different = "the loaded weights have a different checksum than the published ones"
    assert given is not None and received == given.checksum, different


def _sampled(rollout: RolloutWorker) -> tuple[list[list[int]], list[list[int]], list[Any]]:
    """Generate responses. Return (prompts, responses, log-probabilities of response tokens)."""
    import numpy as np

    from ..algorithms.sampling import Sampling
    from ..workers.generation.engine import GenerationRequest

    prompts = [[5 + row, 6, 7 + row] for row in range(4)]
    ids = [np.array(prompt, np.int32) for prompt in prompts]
    requests = [GenerationRequest(row, own, seed=row) for row, own in enumerate(ids)]
    steps = rollout.engine.generate(requests, Sampling(max_tokens=16, stop=None))
    found = sorted((one for step in steps for one in step), key=lambda one: one.request_id)
    return (
        prompts,
        [np.asarray(one.token_ids).tolist() for one in found],
        [one.logprobs for one in found],
    )


def _logprobs(actor: ActorWorker, prompts: Sequence[Any], responses: Sequence[Any]) -> list[list[float]]:
    from ..dataflow.batch import Batch

    batch = Batch.of(prompt_ids=list(prompts), response_ids=list(responses))
    return actor.logprobs(batch, into="found")["found"].to_pylist()


if __name__ == "__main__":
    _main(*sys.argv[1:])
