"""The metrics page: `python docs/generate/metrics_page.py > docs/metrics.md` writes it."""

from __future__ import annotations

from weft.dataflow.metric_names import SECTIONS

INTRODUCTION = """\
# Metrics

All metrics of a run, in sections of related ones. This page is generated from the table in `dataflow/metric_names.py`
(`python docs/generate/metrics_page.py > docs/metrics.md`), and a test compares the two.

A worker group's name is the prefix of its metrics: `actor/entropy`, `rollout/response_length`. An evaluation's name is a further prefix:
`eval/reward/mean`, `eval/rollout/response_length`. Capital letters are placeholders. Metrics of your own rewards, losses and workers
appear as `GROUP/NAME`, and metrics of your own functions as `functions/NAME`. These are not in the table.

A metric is missing in a step that did not measure it. `metrics.parquet` has a row for each step and a column for each metric. Trackers
get the same values ([watching.md](watching.md)).
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
