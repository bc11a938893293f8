"""What a person sees of a ledger: its rows in flight as a table, and what a group waits for."""

from __future__ import annotations

import pyarrow as pa

from .ledger import Ledger
from .rows import RowState


def table(ledger: Ledger) -> pa.Table:
    """Every row in flight, as `sample_id, group_id, parent_id, level, round, tokens, version, done, leased` (node names)."""
    names = [n.name for n in ledger.graph.nodes]

    def of(mask: int) -> list[str]:
        return [name for i, name in enumerate(names) if mask >> i & 1]

    levels = ledger.graph.levels
    return pa.Table.from_pylist(
        [
            {
                "sample_id": r.id,
                "group_id": r.group.id,
                "parent_id": r.parent.id if r.parent else r.id,
                "level": levels[r.level],
                "round": r.group.round,
                "tokens": r.tokens,
                "version": r.version,
                "done": of(r.done),
                "leased": of(r.leased),
                "dropped": of(r.skipped),
            }
            for _, r in sorted(ledger._rows.items())
        ],
        schema=pa.schema(
            [
                ("sample_id", pa.int64()),
                ("group_id", pa.int64()),
                ("parent_id", pa.int64()),
                ("level", pa.string()),
                ("round", pa.int64()),
                ("tokens", pa.int64()),
                ("version", pa.int64()),
                ("done", pa.list_(pa.string())),
                ("leased", pa.list_(pa.string())),
                ("dropped", pa.list_(pa.string())),
            ]
        ),
    )


def why(ledger: Ledger, group_id: int) -> str:
    """What a group waits for, a line per node that has not finished with it."""
    group = ledger._groups.get(group_id)
    if group is None:
        return f"group {group_id} is not in flight: it is finished, or it was never issued"
    lines: list[str] = []
    for i, node in enumerate(ledger.graph.nodes):
        rows = group.levels[node.level]
        left = [r for r in rows if r.state(i) not in (RowState.DONE, RowState.DROPPED)]
        if not left and group.complete[node.level]:
            continue
        leased = sum(1 for r in left if r.state(i) is RowState.LEASED)
        missing = sorted({a for r in left for a in node.after if not ledger._wiring.has_passed(r, a)})
        if not group.complete[node.level]:
            maker = ledger.graph.levels[node.level]
            missing.append(f"the rest of the group from {maker!r}")
        oldest = min((r.version for r in left if r.version is not None and r.version >= 0), default=None)
        if node.operation.behind and not group.rested:
            missing.append("all else to be done with the group")
        too_old = group_id in ledger.readiness.held[i] and f"too old, of version {oldest}; waits for a larger bound"
        state = too_old or (
            f"{leased} leased" if leased else f"waits for {', '.join(missing)}" if missing else "ready, not claimed"
        )
        lines.append(f"{node.name}: {len(left)} of {len(rows)} rows to do; {state}")
    return "\n".join(lines)
