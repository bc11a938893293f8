"""Node memory is read from the kernel, and the tightest limit counts."""

from pathlib import Path

from weft.dataflow.byte_units import GIB
from weft.dataflow.cgroups import cgroup_folders
from weft.workers.node_memory import node_memory


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_the_limit_that_is_nearest_counts_and_caches_do_not(tmp_path: Path):
    write(
        tmp_path / "proc/meminfo",
        f"MemTotal: {64 << 20} kB\nMemFree: 1 kB\nMemAvailable: {48 << 20} kB\n",
    )
    machine = node_memory(tmp_path)
    assert machine is not None and (machine.used_bytes, machine.limit_bytes, machine.by) == (
        16 * GIB,
        64 * GIB,
        "the machine",
    )
    write(tmp_path / "proc/self/cgroup", "0::/jobs/mine\n")
    jobs = tmp_path / "sys/fs/cgroup/jobs"
    write(jobs / "mine/memory.max", "max\n")
    write(jobs / "mine/memory.current", f"{7 * GIB}\n")
    write(jobs / "memory.max", f"{8 * GIB}\n")
    write(jobs / "memory.current", f"{7 * GIB}\n")
    write(jobs / "memory.stat", f"anon 1\ninactive_file {2 * GIB}\n")
    limited = node_memory(tmp_path)
    assert limited is not None and (limited.used_bytes, limited.limit_bytes) == (5 * GIB, 8 * GIB)
    assert (
        str(limited) == "5.0 GiB of 8.0 GiB (the limit of cgroup jobs)" and limited.free_bytes == 3 * GIB
    )


def test_the_older_kind_of_cgroup_has_limits_too(tmp_path: Path):
    write(tmp_path / "proc/self/cgroup", "4:memory:/job\n3:cpu:/other\n")
    job = tmp_path / "sys/fs/cgroup/memory/job"
    write(job / "memory.limit_in_bytes", f"{2 * GIB}\n")
    write(job / "memory.usage_in_bytes", f"{GIB}\n")
    write(job / "memory.stat", f"total_inactive_file {GIB // 2}\n")
    write(job.parent / "memory.limit_in_bytes", "9223372036854771712\n")
    write(job.parent / "memory.usage_in_bytes", f"{GIB}\n")
    found = node_memory(tmp_path)
    assert found is not None and (found.used_bytes, found.limit_bytes) == (GIB // 2, 2 * GIB)
    assert cgroup_folders("memory", tmp_path)[-2:] == [job, job.parent]


def test_missing_kernel_files_give_no_limit(tmp_path: Path):
    assert node_memory(tmp_path) is None
