"""Small models and rows for the tests of training workers."""

import shutil
import sys
from pathlib import Path

import pytest

from weft.dataflow.batch import Batch

sys.path.insert(0, str(Path(__file__).parent))  # for tests here and below, and their ranks


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 of 2 layers, hidden size 64, tied embeddings, random weights, and a placeholder
    tokenizer."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    torch.set_num_threads(1)  # more threads do not help a tiny model, and hurt on a busy machine
    folder = tmp_path_factory.mktemp("models") / "tiny"
    config = Qwen2Config(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        attention_dropout=0.1,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture(scope="session")
def words_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, with a tokenizer of one word per token."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    folder = tmp_path_factory.mktemp("models") / "words"
    shutil.copytree(tiny_model, folder)
    words = {str(token): token for token in range(97)}
    Tokenizer(WordLevel(words, unk_token="0")).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def rows() -> Batch:
    """23 random rows of uneven lengths, with some masked tokens and two temperatures."""
    from training_rows import make_rows

    return make_rows(23)
