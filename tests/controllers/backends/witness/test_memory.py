"""Memory is what the kernel says, by the limit that is nearest."""

import mmap
from pathlib import Path

from weft.controllers.backends.witness.memory import cgroup_folders, course, memory_of, node_memory, object_store
from weft.dataflow.byte_units import GIB


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_own_memory_and_shared_memory_of_this_process_are_told_apart():
    before = memory_of("self")
    with mmap.mmap(-1, 32 << 20) as shared:
        own = bytearray(64 << 20)
        own[::4096] = b"x" * len(own[::4096])
        shared[:] = bytes(32 << 20)
        after = memory_of("self")
    assert before is not None and after is not None
    assert 56 << 20 < after.resident_bytes - before.resident_bytes < 140 << 20
    assert 30 << 20 < after.shared_bytes - before.shared_bytes < 40 << 20


def test_the_limit_that_is_nearest_counts_and_caches_do_not(tmp_path: Path):
    write(tmp_path / "proc/meminfo", f"MemTotal: {64 << 20} kB\nMemFree: 1 kB\nMemAvailable: {48 << 20} kB\n")
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
    assert str(limited) == "5.0 GiB of 8.0 GiB (the limit of cgroup jobs)" and limited.free_bytes == 3 * GIB


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
    assert cgroup_folders(tmp_path)[-2:] == [job, job.parent]


def test_what_rays_object_store_holds_is_the_shared_memory_of_its_process(tmp_path: Path):
    status = "Name: x\nRssAnon:\t 100 kB\nRssFile:\t 10 kB\nRssShmem:\t 2048 kB\n"
    for number, name in (("7", "raylet"), ("8", "python")):
        write(tmp_path / f"proc/{number}/comm", f"{name}\n")
        write(tmp_path / f"proc/{number}/status", status)
    assert object_store(tmp_path) == 2 << 20


def test_a_kernel_that_says_nothing_gives_nothing(tmp_path: Path):
    assert node_memory(tmp_path) is None and memory_of(1, tmp_path) is None and object_store(tmp_path) == 0


def test_a_course_shows_first_and_last():
    assert course([(float(k), k * GIB) for k in range(1, 101)]).endswith("1.0 GiB, 34.0 GiB, 67.0 GiB, 100.0 GiB")
    assert course([(0.0, GIB), (1.0, 2 * GIB)]) == "its own memory in the last 1 s: 1.0 GiB, 2.0 GiB"
    assert course([(0.0, GIB)]) == ""
