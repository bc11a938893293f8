"""Events that change the rows of a graph, as JSON records of the log.

    issue   first, group, step, positions, tokens    issue rows of the source; ids begin at `first`
    source  segment                                  the segment that stores the rows of the source
    claim   lease, node, ids, ...                    lease rows to a node; other fields: its request
    publish lease, ids, tokens, ...                  mark rows as done, or add children of `parents`
    finish  lease, step                              end a lease
    release lease, why, ids                          requeue `ids`; without `ids`, requeue all rows
                                                     and void the lease
    drop    node, ids, why                           drop rows that a node repeatedly failed on
    lose    group, why, again                        give up a group; issue it again unless `again`
                                                     is false
    offer   node, group                              offer a group to a quorum after its deadline

The request of a claim has the fields `rows`, `groups`, `stale` (version, bound and fate of a
`Staleness`), `version` and `holder`. `too_old` lists the groups that the claim set aside; logs of
format 5 and earlier lack it. A publish has the `versions` of its rows (`row_versions`). Published
columns are in one `segment`, or in `segments`: a list of [number of rows, *segment] for each rank,
in row order. Records omit fields without a value.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from json.encoder import encode_basestring_ascii as _quoted
from typing import Any

import numpy as np

_encode = json.JSONEncoder(separators=(",", ":")).encode

RESTARTED = "the run was started again"
"""Reason in the log when recovery releases the leases of lost workers."""
FEW = 8
"""Maximum length of lists that are written without compression."""


def to_json(do: str, graph: str, **fields: Any) -> str:
    """Return the log record of an event, without fields that are None.

    >>> to_json("finish", "train", lease=3, step=None)
    '{"do":"finish","graph":"train","lease":3}'
    """
    text = [f'{{"do":"{do}","graph":{_quoted(graph)}']
    for name, value in fields.items():
        if value is None:
            continue
        if name == "ids":
            text.append(f',"ids":{_ids(value)}')
        elif type(value) is int:
            text.append(f',"{name}":{value}')
        else:
            text.append(f',"{name}":{_quoted(value) if type(value) is str else _encode(value)}')
    text.append("}")
    return "".join(text)


def publish_json(
    graph: str,
    lease: int,
    ids: list[int],
    tokens: list[int],
    segment: Sequence[Any] | None = None,
    versions: list[int] | None = None,
    parents: list[int] | None = None,
    finished: list[int] | None = None,
    segments: Sequence[Sequence[Any]] | None = None,
) -> str:
    """Return the log record of a publish. Must be fast: each generated row writes one."""
    head = f'{{"do":"publish","graph":{_quoted(graph)},"lease":{lease},"ids":'
    where = "" if segment is None else f',"segment":{_located(segment)}'
    # Fast path for the most frequent record: one generated sample.
    if len(ids) == 1 and parents and versions and finished == []:
        one = f'[{ids[0]}],"tokens":[{tokens[0]}]{where}'
        return f'{head}{one},"versions":[{versions[0]}],"parents":[{parents[0]}],"finished":[]}}'
    made = "" if versions is None else f',"versions":{_values(versions)}'
    made += "" if parents is None else f',"parents":{_numbers(parents)}'
    made += "" if finished is None else f',"finished":{_numbers(finished)}'
    if segments is not None:
        made += f',"segments":[{",".join(map(_located, segments))}]'
    return f'{head}{_ids(ids)},"tokens":{_values(tokens)}{where}{made}}}'


def _numbers(numbers: list[int]) -> str:
    return f"[{numbers[0]}]" if len(numbers) == 1 else str(numbers).replace(" ", "")


def _ids(ids: list[int]) -> str:
    """Format ids as JSON. Consecutive ids become [first, number] (see `unpacked` in `log.py`)."""
    # The first ids are a cheap test for lists without runs.
    if len(ids) <= FEW or not (ids[1] - ids[0] == 1 or ids[2] - ids[1] == 1 or ids[3] - ids[2] == 1):
        return _numbers(ids)
    begins = [0, *(np.flatnonzero(np.diff(np.array(ids, np.int64)) != 1) + 1).tolist()]
    # Short runs would not make the record shorter.
    if len(begins) > len(ids) // 2:
        return _numbers(ids)
    ends = [*begins[1:], len(ids)]
    runs = [
        f"[{ids[k]},{end - k}]" if end - k > 1 else str(ids[k])
        for k, end in zip(begins, ends, strict=True)
    ]
    return f"[{','.join(runs)}]"


def _values(values: list[int]) -> str:
    # Write equal values as a single integer, which `unpacked` repeats.
    same = len(values) > FEW and values.count(values[0]) == len(values)
    return str(values[0]) if same else _numbers(values)


def _located(segment: Sequence[Any]) -> str:
    """Format a segment, or [number of rows, *segment], as JSON."""
    *rows, node, file, offset, num_bytes, checksum = segment
    start = f"{rows[0]}," if rows else ""
    return f"[{start}{_names(node, file)},{offset},{num_bytes},{checksum}]"


# Cached: a run publishes many segments in few files.
@lru_cache(maxsize=1 << 14)
def _names(node: str, file: str) -> str:
    return f"{_quoted(node)},{_quoted(file)}"
