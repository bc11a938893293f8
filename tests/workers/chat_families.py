"""Tiny model folders with chat templates that follow the rules of well-known families, in our own
words. The folders have no weights."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

CORPUS = [
    "What is the weather in Paris? It is blue and 20 degrees. The answer is 42.",
    '{"name": "add", "arguments": {"a": 1, "b": 2}}{"name": "ls", "parameters": {"path": "/tmp"}}',
    "<|im_start|>assistant\n<think>\nI think, therefore I call a tool.\n</think>\n\nHello there.",
    "Großmutter fährt schnell. Цвет неба синий. 空は青い。 😀",
]

# A macro for each turn keeps the templates short. `render` is the part of ChatML that all share.
QWEN2 = """\
{%- if tools %}
<|im_start|>system
{{ messages[0].content if messages[0].role == 'system' else 'You help.' }}
Tools:{% for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}<|im_end|>
{% elif messages[0].role == 'system' %}
<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% else %}
<|im_start|>system
You help.<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' or message.role == 'system' and not loop.first %}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% elif message.role == 'assistant' %}
<|im_start|>assistant
{%- if message.content or not message.tool_calls %}{{ '\\n' + message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}{{ '\\n' }}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% elif message.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
<|im_start|>assistant
{% endif %}"""

QWEN3 = """\
{%- if tools or messages[0].role == 'system' %}
<|im_start|>system
{{ messages[0].content if messages[0].role == 'system' else '' }}
{%- for tool in tools or [] %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}
{%- set ns = namespace(query=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.query = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'user' or message.role == 'system' and not loop.first %}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% elif message.role == 'assistant' %}
{%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
<|im_start|>assistant
{% if loop.index0 > ns.query and (loop.last or message.reasoning_content) %}
<think>
{{ (message.reasoning_content or '').strip('\\n') }}
</think>

{% endif %}
{{- content }}
{%- for call in message.tool_calls or [] %}
{%- if content or not loop.first %}{{ '\\n' }}{% endif %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% elif message.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}
<think>

</think>

{% endif %}
{%- endif %}"""

LLAMA3 = """\
{{- bos_token }}
{%- macro head(role) %}<|start_header_id|>{{ role }}<|end_header_id|>{{ '\\n\\n' }}{% endmacro %}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}{% set rest = messages[1:] %}
{%- else %}{% set system = 'You help.' %}{% set rest = messages %}{% endif %}
{{- head('system') }}{% if tools %}{{ 'Environment: ipython\\n' }}{% endif %}{{ system }}<|eot_id|>
{%- for message in rest %}
{%- if message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
{%- set call = message.tool_calls[0].function %}
{{- head('assistant') }}{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|eot_id|>
{%- elif message.role == 'tool' %}
{{- head('ipython') }}{{ message.content | tojson }}<|eot_id|>
{%- else %}
{%- if tools and loop.first %}{% set extra = 'Tools: ' + (tools | tojson) + '\\n' %}{% else %}{% set extra = '' %}{% endif %}
{{- head(message.role) }}{{ extra }}{{ message.content | trim }}<|eot_id|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ head('assistant') }}{% endif %}"""

MISTRAL = """\
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set rest = messages[1:] %}
{%- else %}{% set rest = messages %}{% endif %}
{%- set ns = namespace(turn='user', last=-1) %}
{%- for message in rest %}
{%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- if message.role == 'user' or message.role == 'assistant' and not message.tool_calls %}
{%- if message.role != ns.turn %}{{ raise_exception('user and assistant must take turns') }}{% endif %}
{%- set ns.turn = 'assistant' if ns.turn == 'user' else 'user' %}
{%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in rest %}
{%- if message.role == 'user' %}
{%- if tools and loop.index0 == ns.last %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{{- '[INST]' }}{% if loop.last and system is defined %}{{ system + '\\n\\n' }}{% endif %}{{ message.content }}[/INST]
{%- elif message.tool_calls %}
{{- '[TOOL_CALLS][' }}
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('ids of calls have nine characters') }}{% endif %}
{{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}{% if not loop.last %}, {% endif %}
{%- endfor %}]{{ eos_token }}
{%- elif message.role == 'assistant' %}
{{- ' ' + message.content | trim + eos_token }}
{%- elif message.role == 'tool' %}
{%- if message.tool_call_id | length != 9 %}{{ raise_exception('ids of calls have nine characters') }}{% endif %}
{{- '[TOOL_RESULTS]{"content": ' + (message.content | tojson) + ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- endif %}
{%- endfor %}"""

GPT_OSS = """\
<|start|>system<|message|>You help. Reasoning: {{ reasoning_effort or 'medium' }}<|end|>
{%- if messages[0].role in ('system', 'developer') %}{% set given = messages[0].content %}{% set rest = messages[1:] %}
{%- else %}{% set given = '' %}{% set rest = messages %}{% endif %}
{%- if given or tools %}<|start|>developer<|message|>{{ given }}
{%- for tool in tools or [] %}{{ '\\n' }}{{ tool.function | tojson }}{% endfor %}<|end|>{% endif %}
{%- set ns = namespace(call=none) %}
{%- for message in rest %}
{%- set later = rest[loop.index:] | selectattr('role', 'equalto', 'user') | list %}
{%- if message.role == 'assistant' and message.tool_calls %}
{%- if message.content and message.thinking %}{{ raise_exception('content or thinking, not both') }}{% endif %}
{%- if (message.content or message.thinking) and not later %}
<|start|>assistant<|channel|>analysis<|message|>{{ message.content or message.thinking }}<|end|>
{%- endif %}
{%- set call = message.tool_calls[0].function %}{% set ns.call = call.name %}
<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>{{ call.arguments | tojson }}<|call|>
{%- elif message.role == 'assistant' and loop.last and not add_generation_prompt %}
{%- if message.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>{% endif %}
<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|return|>
{%- elif message.role == 'assistant' %}
{%- set ns.call = none %}
<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>
{%- elif message.role == 'tool' %}
{%- if ns.call is none %}{{ raise_exception('a result without a call') }}{% endif %}
<|start|>functions.{{ ns.call }} to=assistant<|channel|>commentary<|message|>{{ message.content | tojson }}<|end|>
{%- else %}
<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""

BLOCKS = """\
{%- for message in messages %}<|im_start|>{{ message.role }}
{% for block in message.content %}{% if block.type == 'text' %}{{ block.text }}{% endif %}{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

ENDS_ONCE = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'assistant' %}{{ message.content }}
{%- for call in message.tool_calls or [] %}[TOOL_CALLS][{{ call.function | tojson }}]{% endfor %}
{%- if loop.last %}{{ eos_token }}{% endif %}
{%- elif message.role == 'tool' %}[TOOL_RESULTS]{{ message.content }}[/TOOL_RESULTS]
{%- else %}[INST]{{ message.content }}[/INST]
{%- endif %}
{%- endfor %}"""

WRAPPED = """\
{%- for message in messages %}<|im_start|>{{ message.role }}<|message|>
{%- if message.role == 'assistant' %}{{ message.content }}<|end|>{% else %}{{ message.content }}{% endif %}
{{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant<|message|>{% endif %}"""

NULLS = """\
{%- for message in messages %}
{%- if message.role == 'assistant' and message.content is none %}
{%- for call in message.tool_calls %}[TOOL_CALLS]{{ call.function.name + call.function.arguments }}{% endfor %}</s>
{%- elif message.role == 'assistant' %}{{ message.content }}</s>
{%- else %}[INST]{{ message.content }}[/INST]{% endif %}
{%- endfor %}"""


@dataclass(frozen=True)
class Family:
    """A kind of model: its template, special tokens, other added tokens, and stop tokens."""

    template: str
    special: tuple[str, ...]
    stops: tuple[str, ...]
    added: tuple[str, ...] = ()
    bos: str = ""


CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
HEADERS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>")
BRACKETS = ("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]")
BRACKETS += ("[TOOL_RESULTS]", "[/TOOL_RESULTS]")
CHANNELS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>")

FAMILIES = {
    "qwen2": Family(QWEN2, CHATML, ("<|im_end|>", "<|endoftext|>"), TAGS[2:]),
    "qwen3": Family(QWEN3, CHATML, ("<|im_end|>", "<|endoftext|>"), TAGS),
    "llama3": Family(LLAMA3, (*HEADERS, "<|python_tag|>"), ("<|eot_id|>", "<|eom_id|>"), (), HEADERS[0]),
    "mistral": Family(MISTRAL, ("<s>", "</s>", *BRACKETS), ("</s>",), (), "<s>"),
    "gpt_oss": Family(GPT_OSS, (*CHANNELS, "<|return|>", "<|call|>"), ("<|return|>", "<|call|>")),
    "blocks": Family(BLOCKS, CHATML, ("<|im_end|>",)),
    "wrapped": Family(WRAPPED, (*CHATML, "<|message|>", "<|end|>"), ("<|im_end|>",)),
    "nulls": Family(NULLS, ("<s>", "</s>", *BRACKETS), ("</s>",)),
    "ends once": Family(ENDS_ONCE, ("<s>", "</s>", *BRACKETS), ("</s>",), (), "<s>"),
}


@functools.cache
def _backend(special: tuple[str, ...], added: tuple[str, ...]) -> str:
    backend = tokenizers.Tokenizer(models.BPE())
    words = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    split = pre_tokenizers.Split(tokenizers.Regex(words), behavior="isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in added])
    return backend.to_str()


def family_folder(folder: Path, name: str) -> Path:
    """Write the folder of a tiny model of a family."""
    family = FAMILIES[name]
    backend = tokenizers.Tokenizer.from_str(_backend(family.special, family.added))
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    stops = [backend.token_to_id(text) for text in family.stops]
    named = {"eos_token": family.stops[0], **({"bos_token": family.bos} if family.bos else {})}
    files = {
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", **named},
        "config.json": {
            "model_type": "qwen2",
            "architectures": ["Qwen2ForCausalLM"],
            "eos_token_id": stops[0],
        },
        "generation_config.json": {"eos_token_id": stops},
    }
    for file, content in files.items():
        (folder / file).write_text(json.dumps(content))
    (folder / "chat_template.jinja").write_text(family.template)
    return folder
