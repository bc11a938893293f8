"""Small tokenizers of the two common kinds with chat templates, files of rows, and error
messages."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from weft.dataflow.errors import UserError
from weft.dataflow.prompts.prompts import Prompts
from weft.dataflow.prompts.tokenizer import Tokenizer

CORPUS = [
    "What color is the sky? It is blue. The sky is green.",
    "A robe takes 2 bolts of blue fiber and half that much white fiber. How many bolts in total?",
    "2 + 2 = 4, 12 + 30 = 42; the answer is 42.",
    "Großmutter fährt schnell. Цвет неба синий. 空は青い。 ¿Qué? 😀",
]

CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\nTools:' }}
    {%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant', 'tool'] %}
        {{- raise_exception('unknown role ' + message.role) }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ message.content }}{% for call in message.tool_calls %}{{ call | tojson }}{% endfor %}
        {%- endgeneration %}
    {%- else %}
        {{- message['content'] }}
    {%- endif %}
    {{- eos_token + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

LLAMA = (
    "{{ bos_token }}{% for m in messages %}{% if loop.index0 > 8 %}{% break %}{% endif %}"
    "[{{ m.role | upper }}] {{ m.content | trim }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}[ASSISTANT]{% endif %}"
)

USER = {"role": "user", "content": "What color is the sky?"}

BLUE = {"role": "assistant", "content": "It is blue."}

GREEN = {"role": "assistant", "content": "It is green."}


def qwen_like(folder: Path) -> Path:
    """Byte-level BPE, no token added to plain text, ChatML template in a separate file."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    regex = words + r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(regex), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "added_tokens_decoder": {
            str(i): {"content": text, "lstrip": False, "rstrip": False, "single_word": False} | flags
            for i, text, flags in [
                (0, "<|endoftext|>", {"normalized": False, "special": True}),
                (1, "<|im_start|>", {"normalized": False, "special": True}),
                (2, "<|im_end|>", {"normalized": False, "special": True}),
                (
                    backend.get_vocab_size(),
                    "<think>",
                    {"normalized": False, "special": False},
                ),  # not in tokenizer.json
            ]
        },
    }
    return write_tokenizer(folder, backend, config, {"chat_template.jinja": CHATML})


def llama_like(folder: Path) -> Path:
    """BPE over `▁`-marked words with a beginning-of-sequence token, configured like old models."""
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.enable_truncation(max_length=8)  # common in published files, and must not shorten prompts
    backend.enable_padding(length=8)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,  # tokenizer.json wins over this
        "bos_token": {
            "__type": "AddedToken",
            "content": "<s>",
            "lstrip": False,
            "rstrip": False,
            "single_word": False,
            "normalized": False,
        },
        "chat_template": [
            {"name": "default", "template": LLAMA},
            {"name": "tool_use", "template": "{{ tools | tojson }}" + LLAMA},
        ],
    }
    special = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    return write_tokenizer(folder, backend, config, {"special_tokens_map.json": json.dumps(special)})


def write_tokenizer(
    folder: Path, backend: tokenizers.Tokenizer, config: dict[str, Any], files: dict[str, str]
) -> Path:
    folder.mkdir(parents=True)
    backend.save(str(folder / "tokenizer.json"))
    for name, text in {"tokenizer_config.json": json.dumps(config), **files}.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8"
    )
    return path


def parquet(path: Path, rows: list[Any]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def text_of(tokenizer: Path, ids: list[int]) -> str:
    return Tokenizer.load(tokenizer).backend.decode(ids, skip_special_tokens=False)


def complaint(*args: Any, **settings: Any) -> str:
    """Return the error of `Prompts.read` on one line, with paths shortened to file names."""
    with pytest.raises(UserError) as caught:
        Prompts.read(*args, **settings)
    return re.sub(r"(?<![\w/])/\S*/", "", str(caught.value))
