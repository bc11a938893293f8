"""Conversations from data to gradient: only tokens of assistant turns are trained."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import models
from transformers import AutoModelForCausalLM

from weft.algorithms.policy_loss import NegativeLogLikelihood
from weft.algorithms.preference import pairs
from weft.algorithms.preference_loss import LogLikelihood, PreferenceLoss
from weft.dataflow.batch import Batch
from weft.dataflow.prompts.prompts import Prompts
from weft.dataflow.prompts.tokenizer import Tokenizer
from weft.workers.actor import ActorConfig, ActorWorker

LETTERS = "abcdefghijklmnopqrstuvwxyz <>.?"
TEMPLATE = (
    "{% for m in messages %}{{ '<' + m.role + '>' + m.content + ('.' if m.role == 'assistant' else '?') }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
TURNS = (
    ("system", "be kind"),
    ("user", "color"),
    ("assistant", "blue"),
    ("tool", "sunlight"),
    ("assistant", "light blue"),
    ("user", "thanks"),
    ("assistant", "you are welcome"),
)
DIALOGUES = [
    {"messages": [{"role": role, "content": content} for role, content in turns]}
    for turns in (TURNS, TURNS[1:5], TURNS[1:3])
]


@pytest.fixture(scope="module")
def letters() -> Tokenizer:
    """A tokenizer with one token per character, so that text positions equal token positions."""
    backend = Backend(models.BPE({letter: k for k, letter in enumerate(LETTERS)}, []))
    return Tokenizer(backend, chat_template=TEMPLATE)


def actor(model: Path) -> ActorWorker:
    return ActorWorker(ActorConfig(model=str(model), learning_rate=1e-3, max_grad_norm=1e9))


def spans(messages: Any) -> tuple[str, np.ndarray]:
    """Return the text of a conversation, and per character whether it is the assistant's."""
    text, said = "", []
    for message in messages:
        header, end = f"<{message['role']}>", "." if message["role"] == "assistant" else "?"
        text += header + message["content"] + end
        said += [False] * len(header) + [message["role"] == "assistant"] * (len(message["content"]) + 1)
    return text, np.array(said)


@pytest.mark.parametrize("train_on", ["last", "all"])
def test_the_gradient_is_that_of_the_assistants_tokens_alone(
    tiny_model: Path, letters: Tokenizer, train_on: Any
):
    prompts = Prompts.from_rows(DIALOGUES, letters, train_on=train_on)
    rows = Batch.of_table(prompts.table.drop_columns(["messages", "prompt"]))
    worker = actor(tiny_model)
    found = {
        name: metric.value for name, metric in worker.update(rows, loss=NegativeLogLikelihood()).items()
    }

    model = AutoModelForCausalLM.from_pretrained(tiny_model).double()
    total, number = torch.zeros((), dtype=torch.float64), 0
    for dialogue in DIALOGUES:
        text, said = spans(dialogue["messages"])
        if train_on == "last":
            last = dialogue["messages"][-1]["content"] + "."
            said = np.arange(len(text)) >= len(text) - len(last)
        ids = torch.tensor([[LETTERS.index(letter) for letter in text]])
        logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        total = total - logprobs[torch.from_numpy(said[1:])].sum()
        number += int(said.sum())
    (total / number).backward()
    norm = torch.sqrt(
        sum((p.grad.square().sum() for p in model.parameters() if p.grad is not None), torch.zeros(()))
    )
    assert found["tokens"] == number
    assert found["loss"] == pytest.approx((total / number).item(), rel=1e-5)
    assert found["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


def test_pairs_of_several_turns_count_only_those_of_the_assistant(tiny_model: Path, letters: Tokenizer):
    user, ai = (
        lambda text, role=role: {"role": role, "content": text} for role in ("user", "assistant")
    )
    row = {
        "chosen": [user("color"), ai("blue"), user("sure"), ai("yes")],
        "rejected": [user("color"), ai("red"), user("really"), ai("no")],
    }
    table = Prompts.from_rows([row], letters).table
    rows = pairs(
        Batch.of_table(table.select([c for c in table.column_names if "_" in c])).with_columns(
            sample_id=[0]
        )
    )
    rows = rows.with_columns(group_id=[0, 0], prompt_ids=table["prompt_ids"].to_pylist() * 2)
    likelihood = PreferenceLoss(beta=1, score=LogLikelihood(), likelihood=1)
    worker = actor(tiny_model)
    scored = worker.logprobs(rows, into="logprobs").ragged_numpy("logprobs")[0]
    mask = rows.ragged_numpy("response_mask")[0] > 0
    said = "".join(LETTERS[k] for k in rows.ragged_numpy("response_ids")[0][mask])
    assert said == "blue.yes.red.no."
    first = int(rows.lengths("response_ids")[0])
    chosen = float(scored[:first][mask[:first]].sum())
    rejected = float(scored[first:][mask[first:]].sum())
    metrics = {name: metric.value for name, metric in worker.update(rows, loss=likelihood).items()}
    assert metrics["reward_margin"] == pytest.approx(chosen - rejected, abs=1e-3)
