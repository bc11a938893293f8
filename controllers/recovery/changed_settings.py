"""Changed settings: differences between a resumed run and the run that wrote the checkpoint.

Each setting has one of three rules. Its class lists "free" settings, which do not affect the
results, and "fixed" settings, on which the state in the checkpoint depends. The run reports changes
of all others in its first lines.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import pyarrow as pa

from ...dataflow.config import Config
from ...dataflow.errors import UserError
from ...dataflow.graph import TRAIN, Graph, Handle
from ...dataflow.prompts.curriculum import curriculum_of
from ...dataflow.source import Source, TableSource, fingerprint
from ...dataflow.untrusted_text import without_secrets

Rule = Literal["free", "fixed", "reported"]

ORDER_OF_DATA = (f"rows of {TRAIN}", f"data of {TRAIN}", "schedule.shuffle")
"""Settings that decide which row of the training data comes next."""

MERGED = {
    "keep": ("low", "high"),
    "temperatures": ("positive", "negative"),
    "weights": ("desirable_weight", "undesirable_weight"),
}
"""Setting -> the two settings of older versions that it replaces."""
REMOVED = {
    "function.deadline_s": ("10.0", "60.0"),
    "function.opened": ("False",),
    "schedule.short_steps": ("'train'",),
}
"""End of the name of an old setting that affects results -> its defaults, as text."""
REWRITTEN = {
    r", settings=\{\}": "",
    r", opened=False": "",
    r"Math\(deadline_s=10\.0\)": "Math()",
    r"(cap=[^,()]+, floor=[^,()]+), (level='\w+')": r"\2, \1",
    r"low=([^,()]+), high=([^,()]+), (level='\w+')": r"\3, keep=(\1, \2)",
}
"""Pattern in the text of an old list -> its replacement."""


def recorded_settings(
    graphs: Mapping[str, Graph], handles: Mapping[str, Handle], schedule: Config
) -> tuple[dict[str, str], dict[str, Rule]]:
    """Return settings as text, and their rules, by names such as "actor.lora.alpha"."""
    found: list[tuple[str, str, Rule]] = [*_walk("schedule", schedule, "reported")]
    for name, handle in handles.items():
        found += _walk(name, handle.config, "reported")
    for name, graph in graphs.items():
        rule: Rule = "fixed" if name == TRAIN else "reported"
        found.append((f"rows of {name}", str(len(graph.source.table)), rule))
        found.append((f"data of {name}", _identity(graph), rule))
        found.append((f"numbers of {name}", fingerprint(graph.source), "reported"))
        if (curriculum := curriculum_of(graph.source)) is not None and name == TRAIN:
            found += _walk("curriculum", curriculum, "reported")
        for node in graph.nodes:
            found += _walk(f"{name}: {node.name}", node.arguments, "reported")
    rules: dict[str, Rule] = {name: rule for name, _, rule in found}
    texts = {name: text for name, text, _ in found}
    return without_secrets(texts), rules


def changes(
    before: Mapping[str, str], now: Mapping[str, str], rules: Mapping[str, Rule], rule: Rule
) -> list[str]:
    """Return the changed settings under a rule, as "NAME was X, is Y".

    If only one side has a setting, compares it with the closest enclosing setting of the other
    side, which may be None. Leaves it out if there is none.
    """
    found: list[str] = []
    for name in dict.fromkeys([*before, *now]):
        was, there = _value(before, name)
        new, here = _value(now, name)
        if was is None or new is None or was == new:
            continue
        if rules.get(name, rules.get(here, "reported")) == rule:
            found.append(f"{min(here, there, key=len)} was {_short(was)}, is {_short(new)}")
    return list(dict.fromkeys(found))


def with_present_names(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of a checkpoint, with older settings under their current names."""
    found = dict(before)
    for name, text in before.items():
        if text.startswith("["):
            for pattern, new in REWRITTEN.items():
                text = re.sub(pattern, new, text)
            found[name] = text
    for name in now:
        owner, _, last = name.rpartition(".")
        old = [before.get(f"{owner}.{each}") for each in MERGED.get(last, ())]
        if old and None not in old:
            found[name] = f"[{', '.join(map(str, old))}]"
        elif last == "decay" and before.get(name) in ("'linear'", "'cosine'"):
            found[name] = f"[{before[name]}, {before.get(f'{owner}.decay_steps')}]"
        elif last == "alpha" and before.get(f"{owner}.rslora") == "True":
            scaled = float(before[name]) * float(before[f"{owner}.rank"]) ** 0.5
            found[name] = repr(int(scaled) if scaled == int(scaled) else scaled)
        elif last == "stop" and before.get(f"{owner}.ignore_stop") == "True":
            found[name] = "None"
        elif (nested := before.get(f"{owner}.coefficient.{last}")) is not None:
            found[name] = nested
    return found


def removed_settings(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return a line for each setting that no longer exists and was not at its default."""
    return [
        f"{name} was {_short(text)}, and is no longer a setting"
        for name, text in before.items()
        if name not in now
        and (
            ".function.settings." in name
            or any(name.endswith(end) and text not in defaults for end, defaults in REMOVED.items())
        )
    ]


def refuse_fixed(where: object, found: list[str]) -> None:
    """Raise `UserError` if the state in a checkpoint depends on changed settings."""
    if found:
        raise UserError(
            f"cannot resume from {where}: its state depends on settings that have changed: {'; '.join(found)}. Restore the earlier "
            "values and data, or start a new run (another name) from the model that this run saved. If only the data or their order "
            "changed, resume='weights' continues with them"
        )


def _walk(name: str, value: Any, rule: Rule) -> Iterator[tuple[str, str, Rule]]:
    if isinstance(value, Config):
        free, fixed = type(value).resume_rules()
        for field in type(value).model_fields:
            own: Rule = "free" if field in free else "fixed" if field in fixed else rule
            yield from _walk(f"{name}.{field}", getattr(value, field), own)
    elif isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _walk(f"{name}.{key}", inner, rule)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _walk(f"{name}.{field.name}", getattr(value, field.name), rule)
    else:
        yield name, _text(value), rule


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(_text(each) for each in value)}]"
    if hasattr(value, "__qualname__"):
        return str(value.__qualname__)
    # The address of an object differs between runs with equal settings.
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _value(settings: Mapping[str, str], name: str) -> tuple[str | None, str]:
    """Return the value and name of a setting, or of the closest setting that contains it."""
    while name not in settings and "." in name:
        name = name.rpartition(".")[0]
    return settings.get(name), name


def _identity(graph: Graph) -> str:
    """Return a checksum of a source's rows, without floats, which may vary between machines."""
    source: Source = graph.source
    kept = [field.name for field in source.table.schema if not _has_floats(field.type)]
    return fingerprint(TableSource(source.name, source.table.select(kept)))


def _has_floats(kind: pa.DataType) -> bool:
    if pa.types.is_nested(kind):
        return any(_has_floats(kind.field(i).type) for i in range(kind.num_fields))
    return pa.types.is_floating(kind)


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:40]} ... {text[-36:]}"
