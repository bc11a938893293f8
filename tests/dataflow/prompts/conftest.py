"""Tokenizers for the tests of prompts."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for imports of `tiny_tokenizers`


@pytest.fixture(scope="session")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Byte-level BPE with a ChatML template."""
    from tiny_tokenizers import qwen_like

    return qwen_like(tmp_path_factory.mktemp("models") / "qwen2-tiny")


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same without a chat template, like base models."""
    from tiny_tokenizers import qwen_like

    folder = qwen_like(tmp_path_factory.mktemp("models") / "qwen2-base")
    (folder / "chat_template.jinja").unlink()
    return folder


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """BPE over marked words, with a beginning-of-sequence token and a template that trims."""
    from tiny_tokenizers import llama_like

    return llama_like(tmp_path_factory.mktemp("models") / "llama-tiny")
