"""Models agree with `transformers` eager attention on single rows, or are refused by name."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import FAMILIES, VOCABULARY, agreeing_model, amplify, make, make_family

from weft.algorithms.sampling import Sampling
from weft.dataflow.batch import Batch
from weft.dataflow.errors import UserError
from weft.workers.actor import ActorConfig, ActorWorker
from weft.workers.generation.engine import GenerationRequest, generate
from weft.workers.generation.transformers_engine import TransformersEngine
from weft.workers.training.packed_sequences import PackedSequences

LENGTHS = (9, 1, 4, 30, 7)
"""[tokens] Row lengths above and below windows, chunks and original rope lengths."""
MOST_TELLING = (
    "Gemma 2",
    "Phi-3 longrope",
    "dynamic NTK",
    "HyperCLOVAX",
    "ModernBERT-decoder",
    "Llama 4",
    "Gemma 4",
)


def exact_logits(model: Any, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Compute logits in float64 with plain `transformers` and eager attention, row by row."""
    exact = copy.deepcopy(model).double().eval()
    exact.set_attn_implementation("eager")
    if hasattr(exact, "set_experts_implementation"):
        exact.set_experts_implementation("eager")
    with torch.no_grad():
        return [exact(input_ids=row[None], use_cache=False).logits[0].double() for row in rows]


def logprobs(logits: Sequence[torch.Tensor], tokens: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the log-probability of one token per position, concatenated over rows."""
    return torch.cat(
        [x.log_softmax(-1).gather(1, ids[:, None])[:, 0] for x, ids in zip(logits, tokens, strict=True)]
    )


def make_rows(lengths: Sequence[int] = LENGTHS) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randint(3, VOCABULARY, (length,)) for length in lengths]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in MOST_TELLING else pytest.mark.slow) for name in FAMILIES],
)
def test_rows_together_answer_as_transformers_does_with_each_alone(name: str):
    model, rows = make_family(name), make_rows()
    together = agreeing_model(
        copy.deepcopy(model)
    )  # the decision is made on fresh weights, and must hold for trained ones
    amplify(model)
    amplify(together)
    exact = exact_logits(model, rows)
    ids, lengths = torch.cat(rows), PackedSequences.of_lengths(LENGTHS)
    for temperature in (1.0, 0.6):
        expected = logprobs([logits / temperature for logits in exact], rows)
        temperatures = None if temperature == 1 else torch.full((len(ids),), temperature)
        assert float(expected.std()) > 0.1
        for entropy in (False, True):
            with torch.no_grad():
                found, _ = together(
                    ids, lengths, torch.arange(len(ids)), ids, temperatures, entropy=entropy
                )
            assert float((found.double() - expected).abs().max()) < (
                1e-3 if name == "RecurrentGemma" else 5e-5
            )


@pytest.mark.parametrize(
    "name", ["Gemma 2", *(pytest.param(n, marks=pytest.mark.slow) for n in FAMILIES if n != "Gemma 2")]
)
def test_trying_a_model_leaves_its_parameters_as_they_are(name: str):
    model = make_family(name)
    before = {n: p.clone() for n, p in model.named_parameters()}
    agreeing_model(model)
    assert all(torch.equal(before[n], p) for n, p in model.named_parameters())


def test_gradients_through_a_models_own_head_are_its_own():
    model, rows = amplify(make_family("Gemma 2")), make_rows()
    weights = torch.linspace(-1, 1, sum(LENGTHS))
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    expected = logprobs([eager(input_ids=row[None], use_cache=False).logits[0] for row in rows], rows)
    ids = torch.cat(rows)
    found, _ = agreeing_model(model)(
        ids, PackedSequences.of_lengths(LENGTHS), torch.arange(len(ids)), ids, None
    )
    theirs = torch.autograd.grad((expected * weights).sum(), [*eager.parameters()])
    for mine, their in zip(
        torch.autograd.grad((found * weights).sum(), [*model.parameters()]), theirs, strict=True
    ):
        torch.testing.assert_close(mine, their, rtol=1e-4, atol=1e-4 * float(their.abs().max()))


def save(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def trained_logprobs(folder: Path, rows: Sequence[torch.Tensor], **settings: Any) -> list[torch.Tensor]:
    """Return logprobs of all tokens except the first from a training actor; ask twice."""
    actor = ActorWorker(ActorConfig(model=str(folder), learning_rate=1e-3, **settings))
    batch = Batch.of(
        prompt_ids=[row[:1].tolist() for row in rows], response_ids=[row[1:].tolist() for row in rows]
    )
    return [actor.logprobs(batch).ragged("old_logprobs")[0] for _ in range(2)]


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize(
    "name", ["Mixtral", "BioGPT", "Gemma 3 that sees", pytest.param("PhiMoE", marks=pytest.mark.slow)]
)
def test_nothing_in_a_model_that_is_trained_is_random(tmp_path: Path, name: str, again: bool):
    model, rows = amplify(make_family(name)), make_rows((9, 5, 7))
    expected = logprobs([x[:-1] for x in exact_logits(model, rows)], [row[1:] for row in rows])
    for found in trained_logprobs(save(model, tmp_path / "model"), rows, activation_checkpointing=again):
        assert float((found.double() - expected).abs().max()) < 5e-5


@pytest.mark.parametrize("name", ["Gemma 2", pytest.param("Gemma 3", marks=pytest.mark.slow)])
def test_the_transformers_engine_samples_from_the_trainers_distribution(tmp_path: Path, name: str):
    model = amplify(make_family(name))
    engine = TransformersEngine(str(save(model, tmp_path / "model")))
    prompts = [row.numpy().astype(np.int32) for row in make_rows((9, 3))]
    requests = [GenerationRequest(number, prompt, seed=number) for number, prompt in enumerate(prompts)]
    steps = generate(engine, requests, Sampling(max_tokens=12, stop=None))
    for response in (one for step in steps for one in step):
        row = torch.from_numpy(np.concatenate([prompts[response.request_id], response.token_ids])).long()
        exact = logprobs([exact_logits(model, [row])[0][-13:-1]], [row[-12:]])
        assert float((torch.from_numpy(response.logprobs).double() - exact).abs().max()) < 5e-5


_XLM = {"emb_dim": 32, "n_layers": 2, "n_heads": 4}


@pytest.mark.parametrize(
    ("kind", "settings", "named"),
    [
        ("bert", {}, r"BertLMHeadModel\) .*by its settings, is_decoder is False"),
        ("roberta", {}, r"RobertaForCausalLM\) .*by its settings, is_decoder is False"),
        ("big_bird", {}, r"BigBirdForCausalLM\) .*by its settings, is_decoder is False"),
        ("xlm", _XLM, r"XLMWithLMHeadModel\) .*by its settings, causal is False"),
        ("cpmant", {}, r"CpmAntForCausalLM\) cannot be trained: "),
    ],
)
def test_a_model_that_is_not_causal_is_refused_by_name_with_the_reason(
    kind: str, settings: dict[str, Any], named: str, tmp_path: Path
):
    folder = save(make(kind, settings), tmp_path / "model")
    with pytest.raises(UserError, match=rf"model '{folder}' \({named}") as refused:
        ActorWorker(ActorConfig(model=str(folder)))
    assert "it is not causal, its predictions depend on the tokens that follow" in str(refused.value)


@pytest.mark.parametrize(
    ("kind", "settings"), [("big_bird", {"is_decoder": True}), ("xlm", {**_XLM, "causal": True})]
)
def test_the_same_models_are_trained_if_they_are_set_to_be_causal(
    kind: str, settings: dict[str, Any], tmp_path: Path
):
    folder = save(make(kind, settings), tmp_path / "model")
    worker = ActorWorker(ActorConfig(model=str(folder)))
    worker.logprobs(Batch.of(prompt_ids=[[4, 5]], response_ids=[[6, 7, 8]]))
    worker.close()


def test_a_refusal_by_transformers_is_a_user_error(tmp_path: Path):
    folder = save(make("qwen2", {}), tmp_path / "model")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"num_attention_heads": 0}))
    with pytest.raises(UserError, match=f"model '{folder}' cannot be trained: transformers refuses it"):
        ActorWorker(ActorConfig(model=str(folder)))
