"""Direct collectives of FSDP over gloo equal gloo's own."""

from pathlib import Path

from collective_ranks import main
from ranks import run_processes


def test_three_ranks_gather_and_reduce_as_gloo_does(tmp_path: Path):
    run_processes(main, tmp_path, 3)
