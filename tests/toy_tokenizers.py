"""Saves tokenizers of single characters and merged pairs."""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers


def save_tokenizer(
    folder: Path,
    characters: str,
    merges: Sequence[str] = (),
    *,
    end: str = "</s>",
    specials: Sequence[str] = (),
    lowercase: bool = False,
) -> Path:
    """Save a tokenizer with ids in this order: the unknown token, the end token, other special
    tokens, characters, and merged pairs of characters."""
    names = ["<unk>", end, *specials]
    vocabulary = {token: number for number, token in enumerate([*names, *characters, *merges])}
    pairs = [(merged[0], merged[1:]) for merged in merges]
    backend = Tokenizer(models.BPE(vocabulary, pairs, unk_token="<unk>"))
    backend.decoder = decoders.Fuse()
    if lowercase:
        backend.normalizer = normalizers.Lowercase()
    backend.add_special_tokens(names)
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {"eos_token": end, "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
