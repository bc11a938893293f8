"""Settings of a script: a file and flags combine, and each value knows its origin."""

from pathlib import Path
from typing import Literal

import pytest
from pydantic import Field, model_validator

from weft.controllers.settings import compose
from weft.dataflow.config import Config
from weft.dataflow.errors import UserError


class Inner(Config):
    rank: int = Field(default=8, ge=1)
    targets: tuple[str, ...] = ("q", "v")


class Settings(Config):
    model: str
    small: bool = False
    rate: float = 1e-3
    form: Literal["auto", "none"] | None = None
    inner: Inner = Inner()

    @model_validator(mode="after")
    def _fits(self) -> "Settings":
        if self.small and self.inner.rank > 64:
            raise ValueError("small models take a rank of up to 64")
        return self


def composed(folder: Path, *words: str, **files: str) -> tuple[Config, dict[str, str]]:
    for name, content in files.items():
        (folder / name.replace("_", ".")).write_text(content)
    return compose(Settings, [word.replace("@", f"{folder}/") for word in words])


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path):
    text = "model: from-file\nrate: 1e-4\ninner:\n  rank: 4\n  targets: [k]\n"
    words = ("--config", "@s.yaml", "--inner.rank", "2", "--small")
    settings, origins = composed(tmp_path, *words, s_yaml=text)
    assert settings == Settings(
        model="from-file", rate=1e-4, small=True, inner=Inner(rank=2, targets=("k",))
    )
    assert origins == {
        "model": f"{tmp_path}/s.yaml:1",
        "small": "--small",
        "rate": f"{tmp_path}/s.yaml:2",
        "form": "default",
        "inner.rank": "--inner.rank 2",
        "inner.targets": f"{tmp_path}/s.yaml:5",
    }


def test_required_settings_may_come_from_a_file_or_a_flag(tmp_path: Path):
    toml = 'model = "m"\nform = "none"\n[inner]\nrank = 16\n'
    assert composed(tmp_path, "--config=@s.toml", s_toml=toml)[0] == Settings(
        model="m", form="none", inner=Inner(rank=16)
    )
    assert composed(tmp_path, "--config=@e.yaml", "--model", "m", e_yaml="")[0] == Settings(model="m")


def test_a_flag_may_correct_a_mistake_in_the_file(tmp_path: Path):
    text = "model: m\nsmall: true\ninner: {rank: 128}\n"
    with pytest.raises(UserError, match="small models take a rank of up to 64"):
        composed(tmp_path, "--config", "@s.yaml", s_yaml=text)
    assert composed(tmp_path, "--config", "@s.yaml", "--no-small")[1]["small"] == "--no-small"
    assert composed(tmp_path, "--config", "@s.yaml", "--inner.rank", "64")[0] == Settings(
        model="m", small=True, inner=Inner(rank=64)
    )


def test_help_shows_values_from_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        composed(tmp_path, "--config", "@s.yaml", "--help", s_yaml="rate: 0.25\n")
    said = capsys.readouterr().out
    assert end.value.code == 0 and "(default: 0.25)" in said and "--config FILE reads settings" in said
