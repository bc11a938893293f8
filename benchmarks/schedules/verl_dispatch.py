"""verl 0.9.1's `RayWorkerGroup` with workers that do nothing: batches through `DP_COMPUTE_PROTO`. Runs in .venv-peers.

It reports once (turns.py): `{"results": [{"workers", "mib", "wall_ms", ...}, ...]}`, as `dispatch.py` does for Weft.
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import sys
import time
from typing import Any

from turns import Turns

MIB = 1 << 20
WARM_UP = 3


def main(cases: list[tuple[int, int]], steps: int, rows: int) -> None:
    turns = Turns()
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    import ray
    import torch

    proto: Any = importlib.import_module("verl").DataProto  # verl is not in Weft's environment, where types are checked
    workers_of_verl: Any = importlib.import_module("verl.single_controller.base")
    decorator: Any = importlib.import_module("verl.single_controller.base.decorator")
    of_ray: Any = importlib.import_module("verl.single_controller.ray.base")

    class Idle(workers_of_verl.Worker):
        @decorator.register(dispatch_mode=decorator.Dispatch.DP_COMPUTE_PROTO)
        def touch(self, data: Any) -> Any:
            return proto.from_dict(tensors={"seen": torch.zeros(len(data))})

    path = os.pathsep.join(p for p in sys.path if p)
    environment = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    results: list[dict[str, Any]] = []
    most = max(workers for workers, _ in cases)
    ray.init(
        address="local",
        num_cpus=most,
        object_store_memory=1 << 30,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": environment},
    )
    try:
        for workers in sorted({workers for workers, _ in cases}):
            pool = of_ray.RayResourcePool([workers], use_gpu=False, max_colocate_count=1)
            made = of_ray.RayClassWithInitArgs(ray.remote(Idle))
            group = of_ray.RayWorkerGroup(pool, made, device_name="cpu")
            for number, size in cases:
                if number == workers:
                    results.append(measure(group, proto, torch, workers, size, steps, rows * workers))
            for worker in group.workers:
                ray.kill(worker)
            for held in pool.pgs or ():
                ray.util.remove_placement_group(held)
    finally:
        ray.shutdown()
    turns.say(results=results)


def measure(
    group: Any, proto: Any, torch: Any, workers: int, num_bytes: int, steps: int, num_rows: int
) -> dict[str, Any]:
    data = proto.from_dict(tensors={"payload": torch.zeros(num_rows, num_bytes // num_rows // 4)})
    wall: list[float] = []
    cpu: list[float] = []
    for _ in range(WARM_UP + steps):
        begun, begun_cpu = time.perf_counter(), time.process_time()
        out = group.touch(data)
        wall.append((time.perf_counter() - begun) / workers * 1e3)
        cpu.append((time.process_time() - begun_cpu) / workers * 1e3)
        assert len(out) == num_rows
    return {
        "workers": workers,
        "mib": round(num_bytes / MIB, 3),
        "wall_ms": round(statistics.median(wall[WARM_UP:]), 3),
        "cpu_ms": round(statistics.median(cpu[WARM_UP:]), 3),
    }


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
