"""The doctor: all checks one after the other."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ...dataflow.errors import UserError
from .check import Check, Record, try_check
from .checks import CHECKS


def examine(gpu: bool, checks: Sequence[Check] = CHECKS) -> list[Record]:
    """Make the checks, and name each on standard error when it begins.

    Args:
        gpu: use the GPUs of this machine; otherwise what runs on a CPU runs there, and the rest is skipped.
        checks: to make.

    Returns:
        A record of each.

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
        print(f"{check.name} ...", file=sys.stderr, flush=True)
        records.append(try_check(check, gpu))
    return records
