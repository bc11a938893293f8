"""A small model of Qwen3's shape, for programs that train real models: they run with it anywhere, in minutes, without a download.

It has what matters to such a program: a byte-pair tokenizer, made of the task's own texts, special tokens, a chat template that takes
`enable_thinking`, grouped heads, tied embeddings. What it lacks is knowledge: a supervised warm start teaches it the form of an answer.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Iterable
from pathlib import Path

import weft
from weft.algorithms.supervised import supervised
from weft.controllers.run_directory import require_folder

END, START, STOP = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif -%}
"""

BYTES = ("0",)
"""Texts that a tokenizer of single bytes learns from."""
FIRST_NAMES = ("Ana", "Ben", "Chen", "Dara", "Emil", "Fatima", "Goran", "Hana")
THINGS = ("apples", "marbles", "stickers", "books", "shells", "coins", "cards", "pencils")


def word_problems(number: int, seed: int = 0) -> list[dict[str, str]]:
    """Word problems in GSM8K's form, for where no data is given: a question, and a worked answer that ends in `#### 42`.

    >>> problem = word_problems(1)[0]
    >>> sorted(problem), "####" in problem["answer"]
    (['answer', 'question'], True)
    """
    draw = random.Random(seed)
    rows = []
    for _ in range(number):
        (name, other), thing = draw.sample(FIRST_NAMES, 2), draw.choice(THINGS)
        had, bags, each = draw.randint(2, 9), draw.randint(2, 5), draw.randint(2, 9)
        total = had + bags * each
        rows.append(
            {
                "question": f"{name} has {had} {thing}. {other} brings {bags} bags with {each} {thing} in each. "
                f"How many {thing} do they have together?",
                "answer": f"{other} brings {bags} x {each} = {bags * each} {thing}.\n"
                f"Together they have {had} + {bags * each} = {total}.\n#### {total}",
            }
        )
    return rows


def make_model(folder: Path, texts: Iterable[str], seed: int = 0, vocabulary: int = 1024) -> None:
    """Write tokenizer and random weights as `from_pretrained` loads them.

    Args:
        texts: what the tokenizer learns its pairs from.
        vocabulary: tokens, at least 262.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    pairs = Tokenizer(models.BPE())
    pairs.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    pairs.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END, START, STOP, "<think>", "</think>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pairs.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=pairs, eos_token=STOP, pad_token=END)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=pairs.get_vocab_size(),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=pairs.token_to_id(END),
        eos_token_id=pairs.token_to_id(STOP),
        pad_token_id=pairs.token_to_id(END),
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def prepare(root: Path, data: str | None, system: str, seed: int = 0) -> tuple[str, str]:
    """(data, model): problems in GSM8K's form, made where none are given, and a model that answers them in the form asked for.

    Right answers are rare, as those of a real model may be in the beginning. Both are made once for each `root`, data and seed.

    Args:
        root: folder of run directories.
        data: what `Prompts.read` takes; None: `word_problems`.
        system: system prompt.
    """
    made = hashlib.sha256(f"{data} {system} {seed}".encode()).hexdigest()[:8]
    folder = root / f"tiny_qwen3-{made}"

    def make() -> None:
        shutil.rmtree(folder, ignore_errors=True)  # what an interrupted one left
        require_folder(folder, f"root {str(root)!r}")
        print("preparing: a tiny model, and a supervised warm start", flush=True)
        _teach(folder, _data(folder, data, seed), system, seed)

    def sketch(model: Path) -> None:
        _make(model, _data(model.parent, data, seed), system, seed)

    model = weft.prepared(folder / "model", make, sketch)
    return data or str(model.parent / "problems.jsonl"), str(model)


def _data(folder: Path, data: str | None, seed: int) -> str:
    """The data that were given, or word problems, made in the folder."""
    if data is not None:
        return data
    made = folder / "problems.jsonl"
    made.write_text("".join(json.dumps(row) + "\n" for row in word_problems(400, seed)))
    return str(made)


def _make(model: Path, data: str, system: str, seed: int) -> tuple[list[str], list[str]]:
    """A tokenizer and a model for the data; returns its questions and answers."""
    make_model(model, BYTES, seed)
    read = weft.Prompts.read(data, model, chat=False).table
    texts, answers = read["prompt"].to_pylist(), read["answer"].to_pylist()
    make_model(model, [*texts, system, *answers], seed)
    return texts, answers


def _teach(folder: Path, data: str, system: str, seed: int) -> None:
    """A model for the data, trained to answer "It is \\boxed{...}."."""
    texts, answers = _make(folder / "untrained", data, system, seed)
    rows = [
        {"messages": [{"role": "system", "content": system}, {"role": "user", "content": text}, answered(answer)]}
        for text, answer in zip(texts, answers, strict=True)
    ]
    model = str(folder / "untrained")
    actor = weft.group(weft.ActorWorker, model=model, learning_rate=3e-3, warmup_steps=5)
    with weft.Driver(
        supervised(weft.Prompts.from_rows(rows, model, name="answers"), actor=actor),
        schedule=weft.Synchronous(steps=30, prompts_per_step=min(32, len(rows))),
        root=folder,
        name="warm_start",
        record_every=0,
        seed=seed,
        progress=False,
    ) as driver:
        driver.run()
        driver.call(actor, "save", path=folder / "model")


def answered(answer: str) -> dict[str, str]:
    """The message of an assistant that answers.

    >>> answered("42")["content"]
    'It is \\\\boxed{42}.'
    """
    return {"role": "assistant", "content": f"It is \\boxed{{{answer}}}."}


def wrong_and_right(problems: str, system: str) -> str:
    """File of pairs, beside that of the problems: the right answer to each, and one that is off by one."""
    file = Path(problems).with_name("pairs.jsonl")
    return str(
        weft.prepared(
            file, lambda: _write_pairs(problems, system, file), lambda path: _write_pairs(problems, system, path)
        )
    )


def _write_pairs(problems: str, system: str, file: Path) -> None:
    with open(problems) as given, open(file, "w") as made:
        for line in given:
            row = json.loads(line)
            right = int(row["answer"].split("####")[1])
            prompt = [{"role": "system", "content": system}, {"role": "user", "content": row["question"]}]
            pair = {"prompt": prompt, "chosen": [answered(str(right))], "rejected": [answered(str(right + 1))]}
            made.write(json.dumps(pair) + "\n")
