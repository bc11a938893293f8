"""model_card: the README of a trained model, generated from the files of its run."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ..graph import TRAIN
from ..metric_names import metric_of, score_label
from ..untrusted_text import beginning, one_line, redacted
from .facts import facts_of
from .tables import present, read_metrics

_POINTS = 12
"""Number of steps in the table of curves."""
_LONGEST = 200
"""Maximum number of characters of a setting."""
_LOCAL = re.compile(
    r"(?:file://|(?<![\w.:/-])[\w.-]+:(?=/[^/])|(?<![\w.:/-]))(?:~|/|[A-Za-z]:\\)[^\s'\",)\]}]*[/\\](?=[^\s'\",)\]}/\\])"
)
"""Folders of a local path, of a `file:` address or of a path on another host, before its last part."""
_HOME = re.compile(r"(?<![\w.:-])/(?:home|Users)/[^\s/'\",)\]}]+/?(?=[\s'\",)\]}]|$)")
"""A home folder, whose last part is a user's name."""
_CHECKSUMS = re.compile(r"(data|numbers) of ")
"""Beginning of the names of settings that hold a checksum."""


def model_card(
    run: Path, step: int, group: str, settings: Mapping[str, str], *, adapter: bool = False
) -> str:
    """Return a model card in Markdown: base model, method, data, evaluations, curves, settings and
    versions. It has no secrets, no folders of this machine, and no rows of the data.

    Args:
        run: directory of the run.
        step: step of the checkpoint.
        group: worker group of the model.
        settings: the settings in the checkpoint, as text by name.
        adapter: whether the model is an adapter.
    """
    config, table = facts_of(run).config, read_metrics(run)
    rows = [present(row) for row in table.to_pylist()] if table is not None else []
    rows = [row for row in rows if row["step"] <= step]
    graphs = _mapping(config.get("graphs"))
    method = str((_list(graphs.get(TRAIN)) or ["graph unknown"])[0]).removeprefix("graph ")
    base = str(_mapping(_mapping(config.get("groups")).get(group)).get("model", "unknown"))
    is_public = not Path(base).is_dir() and bool(re.fullmatch(r"[\w.-]+/[\w.-]+", base))
    metadata: dict[str, Any] = {
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["weft", method],
        **({"base_model": base} if is_public else {}),
    }
    versions = _mapping(config.get("versions"))
    sections = [
        f"---\n{yaml.safe_dump(metadata, sort_keys=False)}---\n\n# {run.name}, step {step}",
        f"{'An adapter for' if adapter else 'Trained from'} `{_text(base)}` with the graph `{_text(method)}` of "
        f"Weft {versions.get('weft', '(unknown version)')}. Weft generated this card from the files of the run.",
        "## Data\n\n" + _table(("graph", "data", "rows"), _data(config, graphs)),
        "## Evaluations\n\n"
        + _table(("step", "metric", "value", "95 % interval"), _evaluations(rows, graphs)),
        "## Curves\n\n" + _curves(rows, graphs),
        "## Settings\n\n"
        + _table(
            ("setting", "value"),
            ((n, beginning(t, _LONGEST)) for n, t in settings.items() if not _CHECKSUMS.match(n)),
        ),
        "## Versions\n\n" + _table(("package", "version"), versions.items()),
    ]
    return redacted("\n\n".join(sections) + "\n")


def _data(config: Mapping[str, Any], graphs: Mapping[str, Any]) -> Iterator[Sequence[object]]:
    about, sizes = _mapping(config.get("data")), _mapping(config.get("sources"))
    for name in graphs:
        source = _mapping(about.get(name)).get("source", "rows of a program")
        yield name, source, _mapping(sizes.get(name)).get("rows", "")


def _evaluations(
    rows: Sequence[Mapping[str, float]], graphs: Mapping[str, Any]
) -> Iterator[Sequence[object]]:
    """Yield the scores of each evaluation at its last step."""
    for name in graphs:
        of_steps = [(row, list(_scores(row, name))) for row in rows if name != TRAIN]
        row, scores = next(((r, s) for r, s in reversed(of_steps) if s), ({}, []))
        for score in scores:
            ends = [row.get(f"{score}_{end}") for end in ("low", "high")]
            interval = "" if None in ends else "{} to {}".format(*map(_number, ends))
            yield _number(row["step"]), score, _number(row[score]), interval
        for lost in ("prompts", "prompts_lost") if scores else ():
            if (number := row.get(f"{name}/{lost}")) is not None:
                yield _number(row["step"]), f"{name}/{lost}", _number(number), ""


def _scores(row: Mapping[str, float], evaluation: str) -> Iterator[str]:
    for name in row:
        if name.startswith(f"{evaluation}/") and score_label(name.removeprefix(f"{evaluation}/")):
            yield name


def _curves(rows: Sequence[Mapping[str, float]], graphs: Mapping[str, Any]) -> str:
    if not rows:
        return "The run has no metrics."
    of_training = [metric_of(row, one) for one in ("mean", "loss") for row in rows]
    first = [next(_scores(row, name), None) for name in graphs if name != TRAIN for row in rows]
    names = [name for name in dict.fromkeys([*of_training, *first]) if name is not None]
    last = len(rows) - 1
    chosen = sorted({round(last * k / (_POINTS - 1)) for k in range(_POINTS)})
    # The steps with an evaluation are the most interesting ones.
    evaluated = {k for k, row in enumerate(rows) if any(name in row for name in first if name)}
    if len(evaluated) <= _POINTS:
        chosen = sorted({*chosen, *evaluated})
    values = ([_number(rows[k].get(name)) for name in ("step", *names)] for k in chosen)
    return _table(("step", *names), values)


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [[*map(_text, row)] for row in rows]
    if not lines:
        return "None."
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *lines))


def _text(value: object) -> str:
    """Return a value for a cell of a table, without local folders.

    >>> _text("'/home/ann/models/tiny'"), _text("openai/gsm8k"), _text("a|b")
    ("'tiny'", 'openai/gsm8k', 'a\\\\|b')
    >>> _text("file:///home/ann/backup"), _text("nas:/home/ann/x/y"), _text("'/home/ann/'"), _text("https://hf.co/a/b")
    ('backup', 'y', "'~'", 'https://hf.co/a/b')
    """
    text = _LOCAL.sub("", _HOME.sub("~", one_line(str(value))))
    return re.sub(r"([|<`])", r"\\\1", text)


def _number(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return ""
    return f"{value:,.0f}" if value == round(value) and abs(value) < 1e6 else f"{value:.4g}"


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: object) -> Sequence[Any]:
    return value if isinstance(value, list) else ()
