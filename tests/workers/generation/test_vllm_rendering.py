"""vLLM renders and parses next to no engine: the same as Weft where both can, and models that Weft
cannot render."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chat_families import FAMILIES, Family, family_folder

from weft.dataflow.errors import UserError
from weft.workers.agents.messages import Conversation, Message, ToolCall
from weft.workers.agents.parsing import FORMATS
from weft.workers.agents.rendering import Renderer, parsers_of_vllm

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("inspects_models_here")]

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
ADD = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": PARAMETERS}}
CALL = ToolCall("add", {"a": 1, "b": "ä"}, "call00001")
USER = Message("user", "What is 1 + 2?")
TALK = (
    Message("system", "Be brief."),
    USER,
    Message("assistant", "", (CALL,), reasoning="A tool!"),
    Message("tool", "3", tool_call_id="call00001"),
    Message("assistant", "It is 3."),
    Message("user", "Sure?"),
)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama3", "mistral", "gpt_oss", "blocks"])
def test_weft_renders_the_tokens_that_vllm_renders(family: str, tmp_path: Path):
    from weft.workers.generation.vllm_rendering import VllmTemplate

    folder = family_folder(tmp_path / family, family)
    theirs, ours = VllmTemplate(folder), Renderer.load(folder, tool_parser="none")
    talk = TALK
    if family == "gpt_oss":  # vLLM calls thinking "reasoning", which such a template does not read
        talk = tuple(replace(message, reasoning="") for message in talk)
    elif family == "blocks":  # vLLM hands over results of tools as strings, which it does not write
        talk = (*talk[:2], *talk[4:])
    for messages, tools in ((talk, (ADD,)), (talk[:4], (ADD,)), ((USER,), ())):
        given = [message.as_template() for message in messages]
        expected = theirs(given, list(tools) or None, {}, add_generation_prompt=True)
        assert ours.render(Conversation(messages, tools)) == expected


TEXTS = {
    "hermes": [
        'Yes.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "ä"}}\n</tool_call>',
        '<tool_call>{"name": "add", "arguments": {}}</tool_call>\n<tool_call>{"name": "f", "arguments": {"x": [1]}}',
        '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>',
        '<tool_call>{"arguments": {"a": 1}}</tool_call>',
        "No call.",
    ],
    "llama3_json": [
        '{"name": "add", "parameters": {"a": 1, "b": "ä"}}',
        '<|python_tag|>{"name": "add", "parameters": {}}; {"name": "f", "arguments": {"x": {"y": 1}}}',
        '{"answer": 3}',
        "No call.",
    ],
    "mistral": [
        '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": "ä"}}, {"name": "f", "arguments": {}}]',
        "No call.",
    ],
}


@pytest.mark.parametrize("name", TEXTS)
def test_weft_reads_the_calls_that_vllm_reads(name: str, tmp_path: Path):
    from weft.workers.generation.vllm_rendering import load_tool_parser

    family = {"hermes": "qwen2", "llama3_json": "llama3", "mistral": "mistral"}[name]
    theirs, ours = load_tool_parser(family_folder(tmp_path / name, family), name), FORMATS[name]
    assert [ours(text, [ADD]) for text in TEXTS[name]] == [theirs(text, [ADD]) for text in TEXTS[name]]
    assert ours(TEXTS[name][0], [ADD]) is not None and ours("No call.", [ADD]) is None


def test_a_call_that_breaks_vllms_parser_stays_text(tmp_path: Path):
    """The policy wrote it, so the harness reads it. An error would drop the episode."""
    from weft.workers.generation.vllm_rendering import load_tool_parser

    read = load_tool_parser(family_folder(tmp_path / "m", "qwen2"), "internlm")
    call = '<|action_start|><|plugin|>{"name": "add", "parameters": {"a": 1}}<|action_end|>'
    assert read(f"I add.{call}", [ADD]) == ("I add.", [("add", {"a": 1})])
    for broken in (call.replace('"a"', "a"), call * 2, call.replace('"name"', '"tool"')):
        assert read(broken, [ADD]) is None


CODER = """\
{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
<function={{ call.function.name }}>
{%- for name, value in call.function.arguments.items() %}
<parameter={{ name }}>
{{ value }}
</parameter>
{%- endfor %}
</function>
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def test_parsers_of_vllm_read_formats_that_weft_does_not_know(tmp_path: Path):
    folder = family_folder(tmp_path / "m", "qwen3")
    (folder / "chat_template.jinja").write_text(CODER)
    renderer = Renderer.load(folder)
    conversation = Conversation((USER,), (ADD,))

    def parse(text: str) -> Message:
        ids = renderer.tokenizer.encode([text], add_special_tokens=False)[0].tolist()
        return renderer.parse(ids, conversation)

    text = "<think>\nHm.\n</think>\n\nI add.\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
    found = parse(text + "<|im_end|>")
    assert found == Message("assistant", "I add.", (ToolCall("add", {"a": 1}),))
    assert found.reasoning == "Hm." and len(found.tool_calls[0].id) == 9
    broken = "I add.\n<tool_call>\n<function="
    assert parse(broken) == Message("assistant", broken)
    longer = Conversation((USER, found, Message("user", "Sure?")), (ADD,))
    tail = renderer.decode(renderer.tail(longer, 2, renderer.stop_token_ids[0]))
    assert tail == "\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"


def test_the_names_of_parsers_in_vllms_source_are_those_that_it_registers():
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    assert sorted(parsers_of_vllm("tool_parsers")) == ToolParserManager.list_registered()
    assert sorted(parsers_of_vllm("reasoning")) == ReasoningParserManager.list_registered()


def test_unknown_and_unsuitable_parsers_are_refused_by_name(tmp_path: Path):
    folder = family_folder(tmp_path / "m", "qwen2")
    with pytest.raises(UserError, match=r"tool parser 'hermse': vLLM knows none"):
        Renderer.load(folder, tool_parser="hermse")
    with pytest.raises(UserError, match=r"reasoning parser 'olmo': vLLM knows none"):
        Renderer.load(folder, reasoning_parser="olmo")
    with pytest.raises(UserError, match=r"tool parser 'deepseek_v31' does not fit the tokenizer"):
        Renderer.load(folder, tool_parser="deepseek_v31")


def test_a_reasoning_parser_of_vllm_can_be_named(tmp_path: Path):
    renderer = Renderer.load(family_folder(tmp_path / "m", "qwen3"), reasoning_parser="qwen3")
    ids = renderer.tokenizer.encode(
        ["<think>\nHm.\n</think>\n\nYes.<|im_end|>"], add_special_tokens=False
    )[0]
    message = renderer.parse(ids.tolist(), Conversation((USER,)))
    assert (message.content, message.reasoning) == ("Yes.", "Hm.")


# A model without a chat template

END = "<｜end▁of▁sentence｜>"
MARKS = ("<｜begin▁of▁sentence｜>", END, "<｜User｜>", "<｜Assistant｜>")
CONFIG = {
    "model_type": "deepseek_v32",
    "architectures": ["DeepseekV32ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "n_group": 1,
    "topk_group": 1,
    "index_topk": 64,
    "index_n_heads": 2,
    "index_head_dim": 32,
    "max_position_embeddings": 256,
    "vocab_size": 512,
}
INVOKE = """\
<｜DSML｜function_calls>
<｜DSML｜invoke name="add">
<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>
<｜DSML｜parameter name="b" string="true">ä</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜function_calls>"""


@pytest.fixture
def deepseek(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Renderer:
    """A renderer of a DeepSeek V3.2, whose template is code in vLLM. The folder has no weights."""
    added = ("<think>", "</think>", "｜DSML｜")
    monkeypatch.setitem(FAMILIES, "deepseek", Family("", MARKS, (END,), added, MARKS[0]))
    folder = family_folder(tmp_path / "m", "deepseek")
    (folder / "chat_template.jinja").unlink()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return Renderer.load(folder)


def ids_of(renderer: Renderer, text: str) -> list[int]:
    return renderer.tokenizer.encode([text], add_special_tokens=False)[0].tolist()


def test_vllm_renders_models_without_a_chat_template(deepseek: Renderer):
    conversation = Conversation((Message("system", "Be brief."), USER))
    text = f"{MARKS[0]}Be brief.<｜User｜>What is 1 + 2?<｜Assistant｜></think>"
    assert deepseek.decode(deepseek.render(conversation)) == text
    thinking = Conversation((USER,), template_arguments={"thinking": True})
    assert deepseek.decode(deepseek.render(thinking)).endswith("<｜Assistant｜><think>")
    assert "add" in deepseek.decode(deepseek.render(Conversation((USER,), (ADD,))))


def test_turns_and_tails_of_such_a_model(deepseek: Renderer):
    conversation = Conversation((USER,), (ADD,))
    ids = ids_of(deepseek, f"I add.\n\n{INVOKE}{END}")
    called = deepseek.parse(ids, conversation)
    assert called == Message("assistant", "I add.", (CALL,))
    result = Message("tool", "3", tool_call_id=called.tool_calls[0].id)
    tail = deepseek.tail(Conversation((USER, called, result), (ADD,)), 2, ids[-1])
    shown = deepseek.decode(tail)
    assert shown.strip().startswith("<function_results>\n<result>3</result>") and END not in shown
    answer = Message("assistant", "3")
    tail = deepseek.tail(Conversation((USER, answer, USER)), 2, ids_of(deepseek, "3")[-1])
    assert deepseek.decode(tail) == f"{END}<｜User｜>What is 1 + 2?<｜Assistant｜></think>"


def test_thinking_of_such_a_model_is_told_apart(deepseek: Renderer):
    conversation = Conversation((USER,), template_arguments={"thinking": True})
    message = deepseek.parse(ids_of(deepseek, f"Easy.</think>It is 3.{END}"), conversation)
    assert (message.content, message.reasoning) == ("It is 3.", "Easy.")


def test_a_renderer_touches_no_gpu_and_reads_no_weights(
    deepseek: Renderer, monkeypatch: pytest.MonkeyPatch
):
    import torch
    from vllm.model_executor.model_loader import weight_utils

    def refuse(*args: Any, **settings: Any) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr(weight_utils, "safetensors_weights_iterator", refuse)
    before = torch.nn.Module.__init__
    monkeypatch.setattr(torch.nn.Module, "__init__", refuse)
    folder = Path(deepseek.tokenizer.name)
    renderer = Renderer.load(folder)
    monkeypatch.setattr(torch.nn.Module, "__init__", before)
    assert renderer.render(Conversation((USER,))) == deepseek.render(Conversation((USER,)))
    assert not torch.cuda.is_initialized()
    assert not list(folder.glob("*.safetensors"))


def test_messages_that_vllm_refuses_are_users_errors(deepseek: Renderer):
    with pytest.raises(UserError, match="vLLM cannot render the conversation"):
        deepseek.render(Conversation((Message("tool", "3"),)))


def test_a_model_that_vllm_cannot_render_either_is_refused(tmp_path: Path):
    folder = family_folder(tmp_path / "m", "qwen2")
    (folder / "chat_template.jinja").unlink()
    renderer = Renderer.load(folder)
    with pytest.raises(UserError, match="vLLM cannot render the conversation"):
        renderer.render(Conversation((USER,)))
