"""Memory is read from the kernel, and judged by the tightest limit."""

import mmap
from pathlib import Path

from weft.controllers.backends.witness import course, memory_of, object_store
from weft.dataflow.byte_units import GIB


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_private_and_shared_memory_of_this_process_are_distinguished():
    before = memory_of("self")
    # Use mmap: the C library may serve other allocations from memory that was freed.
    with mmap.mmap(-1, 32 << 20) as shared, mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE) as own:
        own[:] = bytes(64 << 20)
        shared[:] = bytes(32 << 20)
        after = memory_of("self")
    assert before is not None and after is not None
    assert 56 << 20 < after.resident_bytes - before.resident_bytes < 140 << 20
    assert 30 << 20 < after.shared_bytes - before.shared_bytes < 40 << 20


def test_the_object_store_is_the_shared_memory_of_rays_process(tmp_path: Path):
    status = "Name: x\nRssAnon:\t 100 kB\nRssFile:\t 10 kB\nRssShmem:\t 2048 kB\n"
    for number, name in (("7", "raylet"), ("8", "python")):
        write(tmp_path / f"proc/{number}/comm", f"{name}\n")
        write(tmp_path / f"proc/{number}/status", status)
    assert object_store(tmp_path) == 2 << 20


def test_missing_kernel_files_give_no_limit(tmp_path: Path):
    assert memory_of(1, tmp_path) is None and object_store(tmp_path) == 0


def test_a_course_shows_first_and_last():
    assert course([(float(k), k * GIB) for k in range(1, 101)]).endswith(
        "1.0 GiB, 34.0 GiB, 67.0 GiB, 100.0 GiB"
    )
    assert course([(0.0, GIB), (1.0, 2 * GIB)]) == "its own memory in the last 1 s: 1.0 GiB, 2.0 GiB"
    assert course([(0.0, GIB)]) == ""
