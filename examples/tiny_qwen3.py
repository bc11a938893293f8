"""A tiny Qwen3 model with word problems, to try programs for real models in two minutes.

Like a real model, it has a byte-pair tokenizer, special tokens, a chat template with
`enable_thinking`, grouped-query attention and tied embeddings. Nothing is downloaded.

A supervised warm start replaces pretraining. The model learns arithmetic and the answer format from
worked solutions. Most solutions of two-step problems stop one step too early. After the warm start,
greedy answers are therefore correct only for problems of one step. RL then teaches the model to do
both steps.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import weft
from weft.algorithms.methods import supervised
from weft.dataflow.runs.directory import require_folder

END, START, STOP = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if loop.last and message.role == 'assistant' %}<think>

</think>

{% endif %}{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif -%}
"""

TEMPLATE_TEXTS = ("system", "user", "assistant", "\n\n")
"""Texts of the chat template. Training on them makes each one token."""
BYTES = ("0",)
"""Training texts that give a tokenizer with one token per byte."""
FIRST_NAMES = ("Ana", "Ben", "Chen", "Dara", "Emil", "Fatima", "Goran", "Hana")
THINGS = ("apples", "marbles", "stickers", "books", "shells", "coins", "cards", "pencils")


PROBLEMS = 2000
"""Number of problems for training and evaluation if the user gives no data."""
DEMONSTRATIONS = 4000
"""Number of other problems, with solutions for the warm start."""
HASTY = 0.75
"""Share of two-step problems whose warm-start solution stops after the first step."""
WARM_STEPS = 160
"""Number of steps of the warm start on worked solutions.

The learning rate decays to a tenth, so that as many answers as solutions stop early. Then greedy
answers solve 40 % of the problems, and for 80 % at least one of four samples is correct.
"""


def word_problems(number: int, seed: int = 0) -> list[dict[str, str]]:
    """Return distinct word problems of one or two steps, in the format of GSM8K.

    A row has a `question`, and a worked `answer` that ends with a line such as `#### 42`.

    >>> word_problems(2)[1]["question"], word_problems(2)[1]["answer"]
    ('Emil has 6 coins. Dara brings 3 coins. How many coins do they have together?', '6 + 3 = 9\\n#### 9')
    """
    draw = random.Random(seed)
    rows: dict[str, str] = {}
    while len(rows) < number:
        (name, other), thing = draw.sample(FIRST_NAMES, 2), draw.choice(THINGS)
        had, bags, each, more = (
            draw.randint(2, 6),
            draw.randint(2, 3),
            draw.randint(2, 4),
            draw.randint(2, 6),
        )
        asked = f"How many {thing} do they have together?"
        if draw.random() < 0.4:
            question = f"{name} has {had} {thing}. {other} brings {more} {thing}. {asked}"
            rows[question] = f"{had} + {more} = {had + more}\n#### {had + more}"
        else:
            question = f"{name} has {had} {thing}. {other} brings {bags} bags with {each} {thing} in each. {asked}"
            total = had + bags * each
            rows[question] = (
                f"{bags} x {each} = {bags * each}\n{had} + {bags * each} = {total}\n#### {total}"
            )
    return [{"question": question, "answer": answer} for question, answer in rows.items()]


def worked(answer: str, steps: int | None = None) -> str:
    """Convert a worked answer of `word_problems` to a response with the result in a box.

    Args:
        steps: number of steps to keep, or None for all.

    >>> print(worked("3 x 4 = 12\\n5 + 12 = 17\\n#### 17"))
    3 x 4 = 12
    5 + 12 = 17
    It is \\boxed{17}.
    >>> print(worked("3 x 4 = 12\\n5 + 12 = 17\\n#### 17", steps=1))
    3 x 4 = 12
    It is \\boxed{12}.
    """
    lines = answer.split("\n")[:-1][:steps]
    return "\n".join([*lines, boxed(lines[-1].rpartition(" ")[2])])


def wrong_solution(answer: str) -> str:
    """Return a response that stops after the first of two steps, or has a wrong result.

    >>> print(wrong_solution("2 + 3 = 5\\n#### 5"))
    2 + 3 = 5
    It is \\boxed{6}.
    """
    *steps, result = answer.split("\n")
    return (
        worked(answer, 1)
        if len(steps) > 1
        else f"{steps[0]}\n{boxed(str(int(result.removeprefix('#### ')) + 1))}"
    )


def boxed(answer: str) -> str:
    """Return the last line of a response, with the final answer in a box.

    >>> boxed("42")
    'It is \\\\boxed{42}.'
    """
    return f"It is \\boxed{{{answer}}}."


def make_model(
    folder: Path,
    texts: Iterable[str],
    seed: int = 0,
    vocabulary: int = 1024,
    chat_template: str = CHAT_TEMPLATE,
) -> None:
    """Save a tokenizer, and a model with random weights, in a folder for `from_pretrained`.

    Args:
        texts: training texts of the tokenizer.
        vocabulary: maximum number of tokens, at least 262.
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
    pairs.train_from_iterator([*texts, *TEMPLATE_TEXTS], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=pairs, eos_token=STOP, pad_token=END)
    tokenizer.chat_template = chat_template
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
    """Return the paths of problems in GSM8K's format, and of a model with a warm start. The first
    call with the same arguments makes both.

    The model solves some of the generated problems. With `data`, it learns only the answer format.

    Args:
        root: folder of run directories.
        data: argument of `Prompts.read`, or None for `word_problems`.
        system: system prompt, which asks for the answer format.
        seed: random seed of problems and model.
    """
    made = hashlib.sha256(f"{data} {system} {seed}".encode()).hexdigest()[:8]
    folder = root / f"tiny_qwen3-{made}"

    def make() -> None:
        shutil.rmtree(folder, ignore_errors=True)  # left by an interrupted warm start
        require_folder(folder, f"root {str(root)!r}")
        print("preparing: a tiny model, and a supervised warm start", flush=True)
        if data is None:
            _teach_to_solve(folder, system, seed)
        else:
            _teach_the_form(folder, data, system, seed)

    def sketch(model: Path) -> None:
        if data is None:
            _make_for_problems(model, system, seed)
        else:
            _make_for_data(model, data, system, seed)

    model = weft.prepared(folder / "model", make, sketch)
    return data or str(model.parent / "problems.jsonl"), str(model)


def _make_for_problems(model: Path, system: str, seed: int) -> list[dict[str, str]]:
    """Save an untrained model with its tokenizer and, next to it, problems. Return other problems,
    for the warm start."""
    rows = word_problems(PROBLEMS + DEMONSTRATIONS, seed)
    lines = [json.dumps(row) + "\n" for row in rows[:PROBLEMS]]
    (model.parent / "problems.jsonl").write_text("".join(lines))
    shown = rows[PROBLEMS:]
    make_model(
        model,
        [system, *(text for row in shown for text in (row["question"], worked(row["answer"])))],
        seed,
    )
    return shown


def _make_for_data(model: Path, data: str, system: str, seed: int) -> tuple[list[str], list[str]]:
    """Save an untrained model, with a tokenizer trained on the data. Return the data's questions
    and answers."""
    make_model(model, BYTES, seed)
    read = weft.Prompts.read(data, model, chat=False).table
    texts, answers = read["prompt"].to_pylist(), read["answer"].to_pylist()
    make_model(model, [*texts, system, *answers], seed)
    return texts, answers


def _teach_to_solve(folder: Path, system: str, seed: int) -> None:
    """Warm-start a model on worked solutions. Most solutions of two steps stop after the first."""
    shown = _make_for_problems(folder / "untrained", system, seed)
    draw = random.Random(seed)
    hasty = (1 if draw.random() < HASTY else None for _ in shown)
    rows = [
        dialogue(system, row["question"], worked(row["answer"], steps))
        for row, steps in zip(shown, hasty, strict=True)
    ]
    warm_start(folder, rows, seed, steps=WARM_STEPS)


def _teach_the_form(folder: Path, data: str, system: str, seed: int) -> None:
    """Warm-start a model on questions with the answers of other questions, so that it learns the
    answer format, but no answer to a held-out question."""
    texts, answers = _make_for_data(folder / "untrained", data, system, seed)
    random.Random(seed).shuffle(answers)
    rows = [dialogue(system, text, boxed(answer)) for text, answer in zip(texts, answers, strict=True)]
    warm_start(folder, rows, seed, steps=30)


def warm_start(
    folder: Path,
    rows: list[dict[str, Any]],
    seed: int,
    *,
    steps: int,
    train_on: Literal["last", "all"] = "last",
) -> None:
    """Train the untrained model in `folder` on dialogues, and save it as `folder / "model"`."""
    model = str(folder / "untrained")
    actor = weft.group(
        weft.ActorWorker,
        model=model,
        learning_rate=4e-3,
        warmup_steps=10,
        decay=("linear", steps),
    )
    solutions = weft.Prompts.from_rows(
        rows,
        model,
        name="solutions",
        chat_template_kwargs={"enable_thinking": False},
        train_on=train_on,
    )
    with weft.Driver(
        supervised(solutions, actor=actor),
        schedule=weft.Synchronous(steps=steps, prompts_per_step=min(32, len(rows))),
        root=folder,
        name="warm_start",
        record_every=0,
        seed=seed,
        progress=False,
    ) as driver:
        driver.run()
        driver.call(actor, "save", path=folder / "model")


def dialogue(system: str, question: str, response: str) -> dict[str, Any]:
    """Return a data row with messages: system prompt, question and response."""
    messages = [("system", system), ("user", question), ("assistant", response)]
    return {"messages": [{"role": role, "content": content} for role, content in messages]}


def wrong_and_right(problems: str, system: str) -> str:
    """Write a pair of a correct and a wrong solution for each problem. Return the path of the file,
    next to the problems."""
    file = Path(problems).with_name("pairs.jsonl")
    return str(
        weft.prepared(
            file,
            lambda: _write_pairs(problems, system, file),
            lambda path: _write_pairs(problems, system, path),
        )
    )


def _write_pairs(problems: str, system: str, file: Path) -> None:
    with open(problems) as given, open(file, "w") as made:
        for line in given:
            row = json.loads(line)
            *prompt, right = dialogue(system, row["question"], worked(row["answer"]))["messages"]
            wrong = dialogue(system, row["question"], wrong_solution(row["answer"]))["messages"][-1]
            made.write(json.dumps({"prompt": prompt, "chosen": [right], "rejected": [wrong]}) + "\n")
