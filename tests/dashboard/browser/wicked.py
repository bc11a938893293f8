"""A run with malicious texts."""

import json
from pathlib import Path
from shutil import copytree

import pyarrow as pa

from weft.dataflow.runs.samples import sample_file_name

MARKUP = "<img src=x onerror=window.harmed=1><script>window.harmed=1</script><style>body{display:none}</style>"
TERMINAL = "\x1b[2J\x1b[31mred\x1b[0m\x07\x08\r\x00"
REVERSED = "\u202egnp.exe\u2066\u200b\ufeff"
WICKED = f"{MARKUP}{TERMINAL}{REVERSED}"
RAW = "\x1b\x07\x08\x00\u202e\u2066\u200b\ufeff"
"""Characters that a page must escape."""
LONG = 5_000_000
NAME = "wicked <img src=x onerror=window.harmed=1>"


def make_wicked(run: Path, root: Path) -> None:
    """Copy a run, and put such texts wherever it has text of a model, a data set or a worker."""
    copied = root / NAME
    copytree(run, copied)
    written = sorted((copied / "samples").glob("train_*.arrow"))[-1]
    with pa.memory_map(str(written)) as file:
        table = pa.ipc.open_file(file).read_all()
    texts = [WICKED, f"{WICKED}{'x' * LONG}", "\n".join([WICKED] * 50)]
    wicked = pa.array([texts[k % 3] if k < 3 else WICKED for k in range(len(table))], pa.string())
    for column in ("prompt", "response", "answer"):
        table = table.set_column(table.schema.get_field_index(column), column, wicked)
    written.unlink()
    name = sample_file_name("train", 41, 9999, 0)
    with pa.ipc.new_file(copied / "samples" / name, table.schema) as file:
        file.write_table(table)
    (copied / "logs").mkdir(exist_ok=True)
    (copied / "logs" / "actor_0.log").write_text(f"{WICKED}\n" * 100)
    alert = {
        "time": 1763851200.2,
        "step": 3,
        "name": WICKED,
        "text": f"worker actor[0]: {WICKED}",
        "ends": False,
    }
    (copied / "alerts.jsonl").write_text(json.dumps(alert) + "\n")
