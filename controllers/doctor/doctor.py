"""The doctor: all checks one after the other."""

from __future__ import annotations

from collections.abc import Sequence

from ...dataflow.errors import UserError
from .check import Check, Record, summary_of, table_of, try_check
from .checks import CHECKS


def examine(gpu: bool, checks: Sequence[Check] = CHECKS) -> list[Record]:
    """Make the checks, and print a table and one line of JSON.

    Args:
        gpu: use the GPUs of this machine; otherwise what runs on a CPU runs there, and the rest is skipped.

    Raises:
        UserError: there is no GPU that torch can use.
    """
    if gpu:
        import torch

        if not torch.cuda.is_available():
            raise UserError(
                f"--gpu: torch {torch.__version__} finds no GPU here; without --gpu the checks run in the form that a CPU allows"
            )
    records: list[Record] = []
    for check in checks:
        print(f"{check.name} ...", flush=True)
        records.append(try_check(check, gpu))
    print(table_of(records))
    print(summary_of(records, gpu))
    return records
