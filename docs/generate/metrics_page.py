"""The metrics page: `python docs/generate/metrics_page.py > docs/metrics.md` writes it."""

from __future__ import annotations

from weft.dataflow.metric_names import SECTIONS

INTRODUCTION = """\
# Metrics

All metrics of a run, by topic. This page is generated from the table in `dataflow/metric_names.py`
(`python docs/generate/metrics_page.py > docs/metrics.md`), and a test checks that it is current.

A worker group's name is the prefix of its metrics: `actor/entropy`, `rollout/response_length`. An evaluation's name is a further prefix:
`eval/reward/mean`, `eval/rollout/response_length`. Capital letters are placeholders. The tables do not list metrics of your own code:
your rewards, losses and workers write `GROUP/NAME`, and your functions `functions/NAME`.

A step has only the metrics that it measured. `metrics.parquet` has one row per step and one column per metric. Trackers get the same
values ([watching.md](watching.md)).
"""


def page() -> str:
    """Return the text of docs/metrics.md."""
    parts = [INTRODUCTION]
    for section in SECTIONS:
        rows = [
            f"| `{e.shown}` | {e.unit} | {e.meaning.replace('|', chr(92) + '|')} | {e.good or '-'} | {e.bad or '-'} |"
            for e in section.entries
        ]
        head = "| metric | unit | what it is | good | bad |\n|---|---|---|---|---|"
        parts.append("\n".join([f"## {section.title}\n\n{section.text}\n", head, *rows]) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    print(page(), end="")
