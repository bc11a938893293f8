"""A small Qwen2.5-VL with random weights, its tokenizer and processor, and rows with images."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from weft.dataflow.batch import Batch

WORDS = [
    "<unk>",
    "user",
    "assistant",
    "what",
    "color",
    "is",
    "it",
    "?",
    "red",
    "green",
    "blue",
    "one",
    "two",
    "three",
]
SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
ID = {word: number for number, word in enumerate([*WORDS, *SPECIAL])}
VOCABULARY = 24
IMAGE = ID["<|image_pad|>"]
STOP = ID["<|im_end|>"]
CONTEXT = 96
TEMPLATE = """\
{%- for m in messages %}<|im_start|> {{ m.role }} {% if m.content is string %}{{ m.content }}{% else %}{% for block in m.content %}
{%- if block.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ block.text }}{% endif %}{% endfor %}{% endif %}
{%- endfor %}<|im_end|>{% if add_generation_prompt %}<|im_start|> assistant{% endif %}"""


def save_model(folder: Path) -> Path:
    """Save the model with heads of 32, as vLLM needs on CPU, and weights that make images
    matter."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import (
        PreTrainedTokenizerFast,
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
    )
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    backend = Tokenizer(models.WordLevel({word: ID[word] for word in WORDS}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    sizes: dict[str, Any] = {"patch_size": 4, "temporal_patch_size": 2}
    Qwen2VLImageProcessorPil(merge_size=2, min_pixels=64, max_pixels=1024, **sizes).save_pretrained(
        folder
    )
    torch.manual_seed(0)
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": CONTEXT,
            "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 100.0},
            "bos_token_id": None,
            "eos_token_id": STOP,
            "pad_token_id": ID["<|endoftext|>"],
            "initializer_range": 0.15,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_heads": 2,
            "spatial_merge_size": 2,
            "window_size": 16,
            "out_hidden_size": 64,
            "fullatt_block_indexes": [1],
            "initializer_range": 0.15,
            **sizes,
        },
        image_token_id=IMAGE,
        video_token_id=ID["<|video_pad|>"],
        vision_start_token_id=ID["<|vision_start|>"],
        vision_end_token_id=ID["<|vision_end|>"],
    )
    Qwen2_5_VLForConditionalGeneration(config).float().save_pretrained(folder)
    return folder


def picture(seed: int, width: int, height: int) -> bytes:
    file = io.BytesIO()
    colors = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(colors).save(file, "PNG")
    return file.getvalue()


def asked(images: int) -> list[int]:
    """Return a prompt with this many image placeholders."""
    image = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]
    words = [
        "<|im_start|>",
        "user",
        *image * images,
        *["what", "color", "is", "it", "?"],
        "<|im_end|>",
        "<|im_start|>",
        "assistant",
    ]
    return [ID[word] for word in words]


PICTURES = [
    [picture(0, 24, 16)],
    [],
    [picture(1, 16, 32), picture(2, 40, 8)],
    [picture(3, 8, 8)],
    [picture(1, 16, 32)],
]
"""Images per row: one, two or none."""


def make_rows() -> Batch:
    """Return rows with responses. One contains the image token, which a policy may sample like any
    other."""
    rng = np.random.default_rng(0)
    responses = [rng.integers(0, len(ID), n).tolist() for n in (6, 9, 4, 1, 7)]
    responses[2][1] = responses[0][-1] = IMAGE
    count = len(responses)
    return Batch.of(
        sample_id=np.arange(count),
        prompt_ids=[asked(len(images)) for images in PICTURES],
        images=PICTURES,
        response_ids=responses,
        temperature=np.array([1, 0.7, 1, 1, 0.7], np.float32),
        advantages=[rng.normal(size=len(r)).tolist() for r in responses],
        old_logprobs=[(-3 + 0.3 * rng.normal(size=len(r))).tolist() for r in responses],
        reference_logprobs=[(-3 + 0.3 * rng.normal(size=len(r))).tolist() for r in responses],
    )
