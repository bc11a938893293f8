"""Memory is read from the kernel, and judged by the tightest limit."""

import mmap
import os
import subprocess
import sys

from weft.controllers.backends.process_diagnostics import memory_course, memory_of, object_store
from weft.dataflow.byte_units import GIB


def test_private_and_shared_memory_of_this_process_are_distinguished():
    before = memory_of(os.getpid())
    # Use mmap: the C library may serve other allocations from memory that was freed.
    with mmap.mmap(-1, 32 << 20) as shared, mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE) as own:
        own[:] = bytes(64 << 20)
        shared[:] = bytes(32 << 20)
        after = memory_of(os.getpid())
    assert before is not None and after is not None
    assert 56 << 20 < after.resident_bytes - before.resident_bytes < 140 << 20
    assert 30 << 20 < after.shared_bytes - before.shared_bytes < 40 << 20


NAMED = """
import mmap, sys
open("/proc/self/comm", "w").write("raylet")
shared = mmap.mmap(-1, 32 << 20)
shared[:] = bytes(32 << 20)
print("up", flush=True)
sys.stdin.readline()
"""


def test_the_object_store_is_the_shared_memory_of_rays_process():
    pipe = subprocess.PIPE
    before = object_store()
    with subprocess.Popen([sys.executable, "-S", "-c", NAMED], stdin=pipe, stdout=pipe) as started:
        assert started.stdout is not None and started.stdout.readline() == b"up\n"
        assert object_store() - before >= 30 << 20
        started.kill()


def test_a_course_shows_first_and_last():
    assert memory_course([(float(k), k * GIB) for k in range(1, 101)]).endswith(
        "1.0 GiB, 34.0 GiB, 67.0 GiB, 100.0 GiB"
    )
    assert (
        memory_course([(0.0, GIB), (1.0, 2 * GIB)]) == "its own memory in the last 1 s: 1.0 GiB, 2.0 GiB"
    )
    assert memory_course([(0.0, GIB)]) == ""
