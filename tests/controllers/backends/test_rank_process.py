"""A rank's process has its environment before it imports modules that read it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import weft
from weft.controllers.backends.rank import _environment, rank_process
from weft.controllers.placement import Place, ResourcePool

SEEING = """
import os, sys
SEEN = os.environ["OMP_NUM_THREADS"], "torch" in sys.modules, "weft" in sys.modules
class Seeing:
    def seen(self): return SEEN
"""
RANK = b"(cseeing\nSeeing\nt."
"""The class of `seeing.py`, pickled by reference."""
BEGIN = """
import pickle, sys
process, environment, rank = pickle.load(open(sys.argv[1], "rb"))
print(*process(environment, rank).seen())
"""


class Seeing:
    """Interface of the ranks in `seeing.py`."""

    def seen(self) -> tuple[str, bool, bool]:
        raise NotImplementedError


@pytest.mark.ray
@pytest.mark.usefixtures("ray_address")  # Ray reads a setting of that cluster on import
def test_imports_of_a_rank_see_its_environment_and_path(tmp_path: Path):
    from ray import cloudpickle

    (tmp_path / "seeing.py").write_text(SEEING)
    environment = {"OMP_NUM_THREADS": "3", "PYTHONPATH": str(tmp_path)}
    pickled = cloudpickle.dumps((rank_process(Seeing), environment, RANK))  # pyright: ignore[reportPrivateImportUsage]
    (tmp_path / "process").write_bytes(pickled)
    done = subprocess.run(
        [sys.executable, "-c", BEGIN, tmp_path / "process"],
        env={"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "3 False False\n", done.stderr


def test_a_rank_sets_its_threads_even_if_a_task_imported_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    import torch

    (tmp_path / "seeing.py").write_text(SEEING)
    before = torch.get_num_threads()
    for name in ("OMP_NUM_THREADS", "PYTHONPATH"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "seeing", raising=False)
    try:
        rank_process(Seeing)({"OMP_NUM_THREADS": str(before + 2), "PYTHONPATH": str(tmp_path)}, RANK)
        assert torch.get_num_threads() == before + 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("gpus", "rollout"), [(2, "1"), (0, "4")])
def test_rollout_ranks_on_gpus_compute_with_one_thread(gpus: int, rollout: str):
    place = Place(ResourcePool("pool", cpus=8, gpus=gpus), ranks=2)
    workers = {"rollout": weft.RolloutWorker, "actor": weft.ActorWorker}
    threads = {
        name: _environment(weft.group(worker, model="model", name=name), place, ())["OMP_NUM_THREADS"]
        for name, worker in workers.items()
    }
    assert threads == {"rollout": rollout, "actor": "4"}
