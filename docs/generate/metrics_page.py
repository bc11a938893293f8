"""The metrics page: `python docs/generate/metrics_page.py > docs/metrics.md` writes it."""

from __future__ import annotations

from weft.dataflow.metric_names import INTRODUCTION, SECTIONS


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
