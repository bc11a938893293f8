"""vLLM's renderers and parsers in a process without an engine.

vLLM needs the model's configuration and its tokenizer. It reads no weights and uses no GPU:
`VllmConfig` is built for the device "cpu" and without quantization, whose checks ask for a GPU.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...dataflow.errors import UserError
from ...dataflow.model_location import find_model_folder

_TOOL_PARSERS = {"cohere": "cohere_command3", "hf": "auto"}
"""Maps modes of vLLM's renderers to tool parsers, where the names differ."""


class VllmTemplate:
    """Renders messages with vLLM, for models whose folder has no chat template.

    Args:
        model: model folder or Hugging Face id.

    Raises:
        UserError: vLLM cannot render this model either.
    """

    def __init__(self, model: str | Path) -> None:
        from vllm.config import DeviceConfig, ModelConfig, VllmConfig
        from vllm.renderers import renderer_from_config
        from vllm.tokenizers.registry import tokenizer_args_from_config

        self._name = str(model)
        folder = str(find_model_folder(model, "config.json"))
        try:
            settings = ModelConfig(folder, skip_tokenizer_init=False)
            settings.quantization = None
            config = VllmConfig(model_config=settings, device_config=DeviceConfig("cpu"))
            self._renderer = renderer_from_config(config)
        except Exception as error:  # pydantic's errors, or any of the model's configuration
            raise self._refused(error) from error
        mode, *_ = tokenizer_args_from_config(settings)
        self.tool_parser = _TOOL_PARSERS.get(mode, mode)
        """vLLM's name of the tool parser for this model."""

    def __call__(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
        *,
        add_generation_prompt: bool,
    ) -> list[int]:
        """Return token ids. Raises a `UserError` if vLLM refuses the messages."""
        from vllm.renderers import ChatParams, TokenizeParams

        given = {**variables, "tools": tools, "add_generation_prompt": add_generation_prompt}
        params = ChatParams(chat_template_kwargs={**given, "tokenize": False})
        length = TokenizeParams(max_total_tokens=None, add_special_tokens=False)
        renderer: Any = self._renderer
        try:
            _, (prompt,) = renderer.render_chat([list(messages)], params, length)
        except Exception as error:  # renderers raise many kinds of errors
            raise self._refused(error) from error
        return list(prompt["prompt_token_ids"])

    def _refused(self, error: Exception) -> UserError:
        return UserError(f"{self._name}: vLLM cannot render the conversation: {error}")


def load_tool_parser(
    model: str | Path, name: str
) -> Callable[[str, Sequence[Mapping[str, Any]]], tuple[str, list[tuple[str, Any]]] | None]:
    """Return a function (text, tools) -> (content, calls) that uses one of vLLM's tool parsers. It
    returns None if the text has no call that the parser can read. Raises a `UserError` for an
    unknown name, or if the parser does not fit the model's tokenizer."""
    from vllm.tool_parsers import ToolParserManager

    tokenizer = _tokenizer(model)
    kind = _known(name, "tool parser", ToolParserManager.get_tool_parser, model, tokenizer)

    def read(text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[tuple[str, Any]]] | None:
        request = _request(tools)
        try:
            found = kind(tokenizer, request.tools).extract_tool_calls(text, request)
        except Exception:  # parsers raise many kinds of errors for calls that they cannot read
            return None
        calls: list[tuple[str, Any]] = []
        for call in found.tool_calls if found.tools_called else ():
            try:
                arguments = json.loads(call.function.arguments or "{}")
                json.dumps(arguments, allow_nan=False)  # replies cannot carry NaN
            except ValueError:
                return None
            if not isinstance(arguments, dict):
                return None
            calls.append((call.function.name, arguments))
        return ((found.content or "").strip(), calls) if calls else None

    return read


def load_reasoning_parser(model: str | Path, name: str) -> Callable[[str, bool], tuple[str, str]]:
    """Return a function (text, opened) -> (thinking, rest) that uses one of vLLM's reasoning
    parsers. Raises the errors of `load_tool_parser`."""
    from vllm.reasoning import ReasoningParserManager

    tokenizer = _tokenizer(model)
    kind = _known(
        name, "reasoning parser", ReasoningParserManager.get_reasoning_parser, model, tokenizer
    )

    def read(text: str, opened: bool) -> tuple[str, str]:
        try:
            thinking, rest = kind(tokenizer).extract_reasoning(text, _request(()))
        except Exception:  # as for calls
            return "", text
        return (thinking or "").strip("\n"), (rest or "").lstrip("\n")

    return read


def _request(tools: Sequence[Mapping[str, Any]]) -> Any:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    message = {"role": "user", "content": ""}
    given = {"tools": [dict(tool) for tool in tools], "tool_choice": "auto"} if tools else {}
    return ChatCompletionRequest.model_validate({"messages": [message], **given})


def _known(
    name: str, what: str, find: Callable[[str], type | None], model: str | Path, tokenizer: Any
) -> Any:
    """Return vLLM's parser class of a name, after a trial with the tokenizer."""
    try:
        kind = find(name)
        assert kind is not None
        kind(tokenizer)
    except KeyError as error:
        raise UserError(f"{what} {name!r}: vLLM knows none of that name; {error.args[0]}") from None
    except Exception as error:  # parsers raise many kinds of errors for missing tokens
        raise UserError(
            f"{what} {name!r} does not fit the tokenizer of {str(model)!r}: {error}"
        ) from error
    return kind


@functools.lru_cache(maxsize=1)
def _tokenizer(model: str | Path) -> Any:
    from vllm.tokenizers import get_tokenizer

    return get_tokenizer(str(find_model_folder(model, "config.json")))
