"""The bytes of tokens, for the common kinds of tokenizers."""

import json
import unicodedata
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizers import CORPUS, llama_like, qwen_like
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from weft.dataflow.errors import UserError
from weft.dataflow.prompts.token_bytes import TokenBytes
from weft.dataflow.prompts.tokenizer import Tokenizer


def metaspace(folder: Path) -> Path:
    """A unigram model over words marked with `▁`, like T5's."""
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=150, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TokenBytes]:
    folder = tmp_path_factory.mktemp("tokenizers")
    made = {"qwen": qwen_like, "llama": llama_like, "metaspace": metaspace}
    return {name: TokenBytes(Tokenizer.load(make(folder / name))) for name, make in made.items()}


def joined(tokens: TokenBytes, ids: list[int]) -> bytes:
    pieces = [tokens.of_id[number] for number in ids]
    assert None not in pieces
    return b"".join(piece for piece in pieces if piece is not None)


@pytest.mark.parametrize("text", [*CORPUS, "x", " x", "  two  spaces ", "a\nb\tc", "<|im_end|></s>"])
def test_the_bytes_of_tokens_are_those_of_the_text(text: str, kinds: dict[str, TokenBytes]):
    [ids] = kinds["qwen"].encode([text])
    assert joined(kinds["qwen"], ids) == text.encode()


@pytest.mark.parametrize("name", ["llama", "metaspace"])
def test_nothing_is_put_before_a_part_of_a_text(name: str, kinds: dict[str, TokenBytes]):
    for text in ("is blue.", " is blue.", "The sky is green.", "12 + 30"):
        [ids] = kinds[name].encode([text])
        assert joined(kinds[name], ids) == text.encode()


@given(text=st.text(alphabet=st.characters(codec="utf-8"), max_size=20))
def test_byte_level_tokens_hold_any_text(text: str, kinds: dict[str, TokenBytes]):
    text = unicodedata.normalize("NFC", text)
    [ids] = kinds["qwen"].encode([text])
    assert joined(kinds["qwen"], ids) == text.encode()


def test_special_tokens_have_no_bytes(kinds: dict[str, TokenBytes]):
    qwen, llama = kinds["qwen"], kinds["llama"]
    assert qwen.special == {0: "<|endoftext|>", 1: "<|im_start|>", 2: "<|im_end|>"}
    assert {"<s>", "</s>", "<unk>"} <= {*llama.special.values()}
    assert all(tokens.of_id[number] is None for tokens in (qwen, llama) for number in tokens.special)
    assert b"<think>" in qwen.of_id, "an added token that is not special"


def test_an_ordinary_token_comes_before_one_for_a_single_byte():
    vocabulary = {"<0x41>": 0, "A": 1, "<0xC3>": 2, "<unk>": 3}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokens = TokenBytes(Tokenizer(backend))
    assert tokens.of_id == [b"A", b"A", b"\xc3", None]
    assert tokens.ids == {b"A": 1, b"\xc3": 2}


@pytest.mark.parametrize(
    ("decoder", "says"),
    [
        (None, "has no decoder, so it separates tokens by spaces"),
        (decoders.WordPiece(), "has a WordPiece decoder, which can change a token by its neighbours"),
        (decoders.Sequence([decoders.Fuse(), decoders.CTC()]), "has a CTC decoder"),
    ],
)
def test_tokens_without_fixed_bytes_are_refused(decoder: decoders.Decoder | None, says: str):
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    if decoder is not None:
        backend.decoder = decoder
    with pytest.raises(UserError, match=f"tokenizer 'words' {says}"):
        TokenBytes(Tokenizer(backend, name="words"))


def test_prefixes_are_removed_wherever_they_are():
    backend = tokenizers.Tokenizer(models.BPE({"▁": 0, "a": 1, "Ġ": 2}, []))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Sequence([normalizers.Prepend("▁")])]
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(), pre_tokenizers.ByteLevel(add_prefix_space=True)]
    )
    backend.decoder = decoders.Fuse()
    content = json.loads(backend.to_str())
    assert TokenBytes(Tokenizer(backend)).encode(["aa"]) == [[1, 1]]
    assert json.loads(backend.to_str()) == content, "the tokenizer itself stays as it is"
